"""The directory of a run: made if it is missing, and removed if the run is refused."""

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
    """Makes the directory if it is missing; UserError where a run cannot write into it."""
    if '://' in workdir:
        raise _refusal(
            workdir,
            f'--workdir {workdir} is no directory of this machine: mount the bucket '
            '(docs/scale.md), and name a directory there.',
        )
    if not is_utf8(workdir):
        raise _refusal(workdir, f'--workdir {workdir!r} is not in UTF-8: name another directory.')
    try:
        os.makedirs(workdir, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _refusal(
            workdir, f'--workdir {workdir} {_instead_of_directory(workdir)}: name a directory.'
        ) from None
    except OSError as error:
        raise _refusal(
            workdir,
            f'--workdir {workdir!r} cannot be made ({error.strerror}): name a '
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
                f'{path} is a pipe, and opening it would wait for ever: remove it, or '
                'take another --workdir.',
            )


def _refusal(path, message):
    return UserError(message, kind='unwritable', field='--workdir', file=path)


def _instead_of_directory(path):
    """What is at a path at which a directory cannot be made."""
    if os.path.islink(path):
        return 'is a link to nothing'
    if os.path.isfile(path):
        return 'is a file'
    return 'is below a file'


@contextlib.contextmanager
def removed_if_refused(workdir: str) -> Iterator[None]:
    """A context for a run whose workdir does not stay when a UserError ends it before it begins.

    A directory that was there before stays. So does one with any file but the log and the lock.
    """
    missing = []  # the directories that the run makes, from the workdir upwards
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
    """Removes a workdir and the directories above it, as far as they hold nothing else."""
    workdir = directories[0]
    if not os.path.isdir(workdir) or not {LOG, LOCK} >= set(os.listdir(workdir)):
        return
    logger = logging.getLogger('vit_jax')
    for handler in logger.handlers[:]:  # they would open the file again
        is_file = isinstance(handler, logging.FileHandler)
        if is_file and os.path.dirname(handler.baseFilename) == workdir:
            logger.removeHandler(handler)
            handler.close()
    with contextlib.suppress(OSError):
        for name in os.listdir(workdir):
            os.remove(os.path.join(workdir, name))
        for directory in directories:
            os.rmdir(directory)
