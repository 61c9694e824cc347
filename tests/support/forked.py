"""Real processes, forked from a server process that has imported JAX and TensorFlow.

The imports take as long as a tiny training run. A fork has its own state and ends like any other
process. tests/main_test.py starts `python -m vit_jax.main` itself.
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

MAIN = 'from vit_jax import cli, main; cli.leave(main.main())'
EVALUATE = 'from vit_jax import cli, evaluate; cli.leave(evaluate.main())'
# Draws no curves, which take a tenth of the time of a run.
UNDRAWN = f'from vit_jax.workdir import curves; curves.draw = lambda *args: None; {MAIN}'
CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(['vit_jax.main', 'vit_jax.training.loop', 'vit_jax.workdir.curves'])


class Forked:
    """A process that runs Python code, with the methods of subprocess.Popen that tests use."""

    def __init__(self, arguments, log, code=MAIN, optimized=True, flags='', explain_after=0):
        """Args:
        arguments: sys.argv[1:] of the code.
        log: path of the file for stdout and stderr.
        code: the Python code.
        optimized: whether JAX compiles with all optimizations.
        flags: further XLA_FLAGS.
        explain_after: seconds after which the process writes the stacks of its threads; 0: never.
        """
        open(log, 'a').close()  # a test may read it before the process writes
        variables = environment()
        variables['XLA_FLAGS'] = f'{variables["XLA_FLAGS"]} {flags}'.strip()
        self._process = CONTEXT.Process(
            target=_run,
            args=(code, list(map(str, arguments)), str(log), variables, optimized, explain_after),
        )
        with pytest.MonkeyPatch.context() as patch:  # the server's imports read the variables
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

    # The server may ignore Ctrl-C, like every background process of a shell.
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
        atexit._run_exitfuncs()  # multiprocessing does not run them
