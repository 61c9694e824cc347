"""Runs commands in their own processes, for the kinds `signals`, `datasets` and `outputs`.

The kinds provide Python code that a process runs before the command. Processes are forks
(tests/support/forked.py). For cases about the start of the interpreter, `as_typed` replaces the
fork by the command of a user.
"""

import faulthandler
import functools
import importlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests.campaign import cases
from tests.campaign.cases import Failure
from tests.support.forked import Forked
from tests.support.runs import ROOT, arguments

LOG = 'command.log'
POLL_INTERVAL = 0.02  # seconds between two checks of a process


def leave(module):
    """The code that runs a command of vit_jax."""
    return f'from vit_jax import cli, {module}; cli.leave({module}.main())'


def training(workdir, fields):
    """The arguments of a training run of one process."""
    return [*arguments(workdir, fields=fields), '--num_processes=1']


def start(argv, module, first='', explain_after=0):
    """Starts a process that runs the Python code `first` and then a command, and writes to LOG.

    SIGUSR1 makes it write the stacks of all threads.
    """
    pathlib.Path(LOG).touch()
    code = (
        'from tests.campaign import commands; commands.explain_on_request()\n'
        f'{first}\n{leave(module)}'
    )
    return Forked(argv, LOG, code=code, optimized=False, explain_after=explain_after)


def explain_on_request():
    """Makes SIGUSR1 print the stacks of all threads of this process."""
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def as_typed(module, **variables):
    """Replaces this process by `python -m vit_jax.MODULE` with its arguments."""
    os.environ.update(variables, PYTHONPATH=str(ROOT))
    os.execv(sys.executable, [sys.executable, '-m', f'vit_jax.{module}', *sys.argv[1:]])


def at_call(place, call, action):
    """Calls `action` before the call number `call` of MODULE:NAME or MODULE:CLASS.NAME."""
    module, _, path = place.partition(':')
    owner = importlib.import_module(module)
    *parents, last = path.split('.')
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, last)
    calls = itertools.count(1)

    @functools.wraps(original)
    def counted(*arguments, **keywords):
        if next(calls) == call:
            action()
        return original(*arguments, **keywords)

    setattr(owner, last, counted)


def end(process, seconds):
    """The exit code of a process, or None if it runs for longer than some seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def stop(process):
    """Kills a hanging process; returns the end of its log, with the stacks of its threads."""
    process.send_signal(signal.SIGUSR1)
    end(process, 2)
    process.kill()
    process.wait()
    return log()[-5000:]


def log():
    """The output of the process so far."""
    return cases.of_commands(pathlib.Path(LOG).read_text(errors='replace'))


def patience(seconds):
    """The limit of `seconds`, extended by the current load of the machine."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_for(path, process, seconds):
    """Waits for a file; returns False if the process ends or some seconds pass first."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True


def require_one_message(written):
    """Raises Failure unless the stderr of a failed command has one message."""
    errors = [line for line in written.splitlines() if line.startswith('error: ')]
    if len(errors) != 1:
        raise Failure('no message', f'{len(errors)} errors: {written[-300:]}')


def read_finite_json(text):
    """The value of a JSON text; raises Failure for NaN and infinity, which are not JSON."""

    def refuse(name):
        raise Failure('silent', f'{name} in JSON')

    return json.loads(text, parse_constant=refuse)
