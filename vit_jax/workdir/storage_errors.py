"""Finds the cause of a failed read or write: a full disk, too little memory and so on."""

import errno
import os
import re

from vit_jax.errors import UserError


def reason(error: BaseException | None) -> str:
    """The cause of a storage error, such as 'No space left on device'; '' if it is unknown."""
    while error is not None:
        number = getattr(error, 'errno', None) or _number_in_text(str(error))
        if number:
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return ''


def _number_in_text(text):
    """The errno in a message of TensorStore, whose errors have no attribute `errno`."""
    match = re.search(r"(?:OS error |Errno |os_error_code=')(\d+)", text)
    if match is None:
        return None
    return int(match[1])


def require_not_scarce(error: BaseException, subject: str) -> None:
    """Raises UserError if too few open files or too little memory caused an error.

    Args:
      error: the error that occurred while the subject was read.
      subject: the unread file in words, for the message.
    """
    cause = reason(error)
    if cause in map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)):
        raise UserError(
            f'{subject} cannot be read: {cause}. It is unchanged. Raise the limit '
            '(`ulimit -a` shows all) and run the same command again.',
            kind='resource',
        ) from error
