"""Several real processes on this machine that write their output to files."""

import contextlib
import functools
import socket
import subprocess
import time

from tests.support.forked import Forked
from tests.support.runs import ROOT, environment

# The loop of a training run, without a model.
PROGRAM = """
import sys, time
from vit_jax.processes import consensus, launch
from vit_jax import terminal
from vit_jax.workdir.interrupts import Interrupts
def between_steps(step):
    pass
{first}
terminal.log_to_terminal()
with launch.leave_on_error():
    launch.start({coordinator!r}, {number}, {process}, {timeout})
    with Interrupts() as interrupts:
        step = 0
        while step < {steps} and not interrupts.anywhere():
            step += 1
            print('step', step, flush=True)
            between_steps(step)
            time.sleep(0.01)
        received = max(consensus.gather(interrupts.received or 0))
    print('left after', step, flush=True)
    launch.finish()
sys.exit(128 + received if received else 0)
"""


def free_port():
    with socket.socket() as s:
        s.bind(('', 0))
        return s.getsockname()[1]


class Processes:
    """Processes that write their output to files; the end of the context kills them."""

    def __init__(self, folder, starts):
        """Args:
        folder: for the logs.
        starts: one function per process, which starts it with the path of its log.
        """
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.all = [start(self._log(i)) for i, start in enumerate(starts)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()

    def _log(self, i):
        return self._folder / f'{i}.log'

    def log(self, i):
        return self._log(i).read_text()

    def wait_for(self, text, i=0, timeout=400):
        """Waits until a running process has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.log(i):
            assert self.all[i].poll() is None, self.log(i)
            assert time.monotonic() < deadline, self.log(i)
            time.sleep(0.01)

    def wait(self, codes, timeout=400):
        """Waits for all processes, checks their exit codes and returns their logs."""
        deadline = time.monotonic() + timeout
        for process in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        logs = [self.log(i) for i in range(len(self.all))]
        assert [p.returncode for p in self.all] == codes, '\n'.join(logs)
        return logs

    def last_line(self, i):
        """The last line of an ended process, whose companion may print it a moment later."""
        deadline = time.monotonic() + 5
        while True:
            lines = self.log(i).splitlines() or ['']
            if lines[-1].startswith('error: ') or time.monotonic() > deadline:
                return lines[-1]
            time.sleep(0.05)


def started(command, log, **variables):
    """Starts a process that runs a command and writes to a log."""
    with open(log, 'w') as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment() | variables,
        )


def start_programs(folder, number, first=None, numbers=None, steps=100_000, timeout=60):
    """Starts PROGRAM several times.

    Args:
      folder: for the logs.
      number: number of processes.
      first: {process: Python code that it runs first}.
      numbers: {process: its --num_processes, if it differs from `number`}.
      steps: number of steps of the loop.
      timeout: seconds to wait for all processes.
    """
    coordinator = f'127.0.0.1:{free_port()}'
    return Processes(
        folder,
        [
            functools.partial(
                Forked,
                [],
                code=PROGRAM.format(
                    first=(first or {}).get(i, ''),
                    coordinator=coordinator,
                    process=i,
                    steps=steps,
                    number=(numbers or {}).get(i, number),
                    timeout=timeout,
                ),
            )
            for i in range(number)
        ],
    )
