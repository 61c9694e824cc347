"""Real processes that are forked from one which has imported JAX and TensorFlow already.

Importing them takes as long as a tiny training run. A fork has state of its own and is killed like
any other process; `python -m vit_jax.main` itself is started by tests/main_test.py.
"""

import atexit
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from tests.support.runs import environment

MAIN, EVALUATE = (
    f'from vit_jax import cli, {name}; cli.leave({name}.main())' for name in ('main', 'evaluate')
)
# Without its curves, a tenth of its time, as runs in the process of the tests.
UNDRAWN = f'from vit_jax.workdir import curves; curves.draw = lambda *args: None; {MAIN}'
CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(['vit_jax.main', 'vit_jax.training.loop', 'vit_jax.workdir.curves'])


class Forked:
    """A process that runs Python code, with the methods of subprocess.Popen that tests use."""

    def __init__(self, arguments, log, code=MAIN, optimized=True, flags='', explain_after=0):
        """Args:
        arguments: what the code finds in sys.argv behind its name.
        log: path of the file for what it writes.
        optimized: whether JAX compiles with all optimizations.
        flags: further XLA_FLAGS.
        explain_after: seconds after which it writes where all its threads are; 0: not.
        """
        open(log, 'a').close()  # who waits for a line may read it before the process writes
        variables = environment()
        variables['XLA_FLAGS'] = f'{variables["XLA_FLAGS"]} {flags}'.strip()
        self._process = CONTEXT.Process(
            target=_run,
            args=(code, list(map(str, arguments)), str(log), variables, optimized, explain_after),
        )
        with pytest.MonkeyPatch.context() as patch:  # what the server has imports reads it
            for name, value in variables.items():
                patch.setenv(name, value)
            self._process.start()

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired('a forked process', timeout)
        return self.returncode

    def send_signal(self, signum):
        if self.returncode is None:
            os.kill(self._process.pid, signum)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _run(code, arguments, log, variables, optimized, explain_after):
    import jax

    # The server of forks may ignore Ctrl-C, as a process of a shell in the background does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    if explain_after:
        faulthandler.dump_traceback_later(explain_after, file=sys.__stderr__)
    os.environ.update(variables)
    sys.argv = ['forked', *arguments]
    jax.config.update('jax_disable_most_optimizations', not optimized)
    try:
        exec(code, {'__name__': '__main__'})
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
