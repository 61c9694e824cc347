"""Why a library could not read or write: what the storage or the machine lacks."""

import errno
import os
import re

from vit_jax.errors import UserError


def reason(error: BaseException | None) -> str:
    """'No space left on device' for an error that comes from the storage, '' for others."""
    while error is not None:
        number = getattr(error, 'errno', None) or _number_in_text(str(error))
        if number:
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return ''


def _number_in_text(text):
    """The number of an error of the system in a message of TensorStore, which has no `errno`."""
    number = re.search(r"(?:OS error |Errno |os_error_code=')(\d+)", text)
    return int(number[1]) if number else None


def require_not_scarce(error: BaseException, what: str) -> None:
    """Raises UserError where not the file but the machine is why `what` could not be read."""
    why = reason(error)
    if why in map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)):
        raise UserError(
            f'{what} cannot be read: {why}. It was left as it is. Raise the limit '
            '(`ulimit -a` shows all) and run the same command again.',
            kind='resource',
        ) from error
