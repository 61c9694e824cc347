"""The lock of a workdir, which allows one run at a time."""

import contextlib
import fcntl
import os

from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.workdir import run_directory
from vit_jax.workdir.run_directory import LOCK


def reserve(workdir: str) -> contextlib.ExitStack:
    """Creates the workdir and reserves it for this run.

    Returns:
      The reservation, which ends when it is closed.

    Raises:
      UserError: another run is training in the workdir, or the processes have different workdirs.
    """
    path = os.path.join(workdir, LOCK)

    def lock():
        run_directory.make(workdir)
        try:
            file = stack.enter_context(open(path, 'a', encoding='utf-8'))  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f'another process is training in {workdir}. Wait for it, stop it, or '
                'use another --workdir.',
                kind='conflict',
                file=workdir,
            ) from error
        except OSError as error:
            raise UserError(
                f'{path}, which reserves the workdir for this run, cannot be written '
                f'({error.strerror}): remove it, or use another --workdir.',
                kind='unwritable',
                file=path,
            ) from error

    with contextlib.ExitStack() as stack:
        consensus.from_main(lock)
        exists = consensus.gather(os.path.exists(path))
        if not all(exists):
            raise UserError(
                f'process {exists.index(False)} does not find the workdir {workdir} of '
                'process 0: expected a directory on storage that all hosts share.',
                kind='missing',
                file=workdir,
            )
        return stack.pop_all()
