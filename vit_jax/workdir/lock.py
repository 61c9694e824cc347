"""The lock of a workdir: one run at a time trains in it."""

import contextlib
import fcntl
import os

from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.workdir import run_directory
from vit_jax.workdir.run_directory import LOCK


def reserve(workdir: str) -> contextlib.ExitStack:
    """Makes the workdir and reserves it for this run until what is returned is closed.

    Raises UserError when another run is training in it, or processes have different directories.
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
                'take another --workdir.',
                kind='conflict',
                file=workdir,
            ) from error
        except OSError as error:
            raise UserError(
                f'{path} cannot be written ({error.strerror}), which reserves the '
                'workdir for this run: remove it, or take another --workdir.',
                kind='unwritable',
                file=path,
            ) from error

    with contextlib.ExitStack() as stack:
        consensus.from_main(lock)
        finds_it = consensus.gather(os.path.exists(path))
        if not all(finds_it):
            raise UserError(
                f'process {finds_it.index(False)} does not find the workdir {workdir} of '
                'process 0: it must be a directory on storage that all hosts share.',
                kind='missing',
                file=workdir,
            )
        return stack.pop_all()
