"""Commands as processes of their own, for cases of signals, of data that changes and of streams.

The code that a process runs first, as 'from tests.campaign import commands; commands.arm(...)', is
made by the kinds. Processes are forked (tests/support/forked.py) unless a case is about the start
of the interpreter: then `as_typed` replaces the fork by the command as a user types it.
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
ENDED = 0.02  # seconds between two looks at a process


def leave(module):
    """The code that runs a command of vit_jax to its end."""
    return f'from vit_jax import cli, {module}; cli.leave({module}.main())'


def training(workdir, fields):
    """The arguments of a training run of one process."""
    return [*arguments(workdir, fields=fields), '--num_processes=1']


def start(argv, module, first='', explain_after=0):
    """A process that runs `first`, Python code, and then a command; it writes to LOG.

    SIGUSR1 lets it write where all its threads are.
    """
    pathlib.Path(LOG).touch()
    code = (
        'from tests.campaign import commands; commands.explain_on_request()\n'
        f'{first}\n{leave(module)}'
    )
    return Forked(argv, LOG, code=code, optimized=False, explain_after=explain_after)


def explain_on_request():
    """SIGUSR1 prints the stacks of all threads of this process."""
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def as_typed(module, **variables):
    """Replaces this process by `python -m vit_jax.MODULE` with its arguments."""
    os.environ.update(variables, PYTHONPATH=str(ROOT))
    os.execv(sys.executable, [sys.executable, '-m', f'vit_jax.{module}', *sys.argv[1:]])


def at_call(place, call, action):
    """Lets `action` be called before a call of a function, MODULE:NAME or MODULE:CLASS.NAME."""
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
    """The exit code of a process; None if it is still there after some seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def stop(process):
    """Kills a process that should have ended; returns what it wrote, and where its threads are."""
    process.send_signal(signal.SIGUSR1)
    end(process, 2)
    process.kill()
    process.wait()
    return log()[-5000:]


def log():
    """What the process has written by now."""
    return cases.of_commands(pathlib.Path(LOG).read_text(errors='replace'))


def patience(seconds):
    """Seconds that a process may take which must end within `seconds`, on a machine this busy."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_for(path, process, seconds):
    """Whether a file appears before a process ends, and within some seconds."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(ENDED)
    return True


def require_one_message(written):
    """Raises Failure unless what a failed command wrote to stderr has one message."""
    errors = [line for line in written.splitlines() if line.startswith('error: ')]
    if len(errors) != 1:
        raise Failure('no message', f'{len(errors)} errors: {written[-300:]}')


def read_finite_json(text):
    """The value of a JSON text; Failure for NaN and infinity, which JSON does not have."""

    def refuse(name):
        raise Failure('silent', f'{name} in JSON')

    return json.loads(text, parse_constant=refuse)
