"""Creates the directory of a run, and removes it if the run is refused."""

import contextlib
import logging
import os
from collections.abc import Iterator

from vit_jax.errors import UserError
from vit_jax.files import is_utf8, special_kind
from vit_jax.processes import consensus

LOCK = '.lock'
LOG = 'train.log'


def make(workdir: str) -> None:
    """Creates the directory if it is missing. Raises UserError if a run cannot write into it."""
    if '://' in workdir:
        raise _refusal(
            workdir,
            f'--workdir is {workdir}: expected a directory of this machine. Mount the bucket '
            '(docs/how-to/many-hosts.md) and name a directory there.',
        )
    if not is_utf8(workdir):
        raise _refusal(
            workdir, f'--workdir is {workdir!r}: expected a name in UTF-8. Name another directory.'
        )
    try:
        os.makedirs(workdir, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _refusal(
            workdir, f'--workdir {workdir} {_obstacle(workdir)}: name a directory.'
        ) from None
    except OSError as error:
        raise _refusal(
            workdir,
            f'--workdir {workdir!r} cannot be created ({error.strerror}): name a '
            'directory that can be written.',
        ) from error
    if not os.access(workdir, os.W_OK | os.X_OK):
        raise _refusal(
            workdir,
            f'--workdir {workdir} cannot be written (read-only, or of another user): '
            'name a directory that can be written.',
        )
    for name in os.listdir(workdir):
        path = os.path.join(workdir, name)
        if special_kind(path) == 'a named pipe':
            raise _refusal(
                path,
                f'{path} is a pipe, and opening it would never return: remove it, or '
                'use another --workdir.',
            )


def _refusal(path, message):
    return UserError(message, kind='unwritable', field='--workdir', file=path)


def _obstacle(path):
    """The predicate of a message about a path at which no directory can be created."""
    if os.path.islink(path):
        return 'is a broken link'
    if os.path.isfile(path):
        return 'is a file'
    return 'is below a file'


@contextlib.contextmanager
def removed_if_refused(workdir: str) -> Iterator[None]:
    """Removes a new workdir again if a UserError leaves this context before the run starts.

    A directory that existed before stays. A directory with other files than the log and the lock
    stays as well.
    """
    missing = []  # the directories that the run creates, from the workdir upwards
    path = os.path.abspath(workdir)
    while '://' not in workdir and is_utf8(path) and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        yield
    except UserError:
        if missing and consensus.is_main():
            _remove_empty_run(missing)
        raise


def _remove_empty_run(directories):
    """Removes a workdir, and then the empty directories above it."""
    workdir = directories[0]
    if not os.path.isdir(workdir) or not {LOG, LOCK} >= set(os.listdir(workdir)):
        return
    logger = logging.getLogger('vit_jax')
    for handler in logger.handlers[:]:  # an open handler would create the file again
        is_file = isinstance(handler, logging.FileHandler)
        if is_file and os.path.dirname(handler.baseFilename) == workdir:
            logger.removeHandler(handler)
            handler.close()
    with contextlib.suppress(OSError):
        for name in os.listdir(workdir):
            os.remove(os.path.join(workdir, name))
        for directory in directories:
            os.rmdir(directory)
