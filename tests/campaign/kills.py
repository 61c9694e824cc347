"""Real runs of one or two processes that a signal stops in any phase, and that then resume.

The signal comes at the first function call of a phase, or a moment later. In the end the run must
be bit-identical to an uninterrupted run.
"""

import functools
import importlib
import itertools
import os
import pathlib
import signal
import threading

from tests.campaign import cases, runs
from tests.campaign.cases import Failure
from tests.support.forked import MAIN, Forked
from tests.support.processes import Processes, free_port
from tests.support.runs import arguments

SECONDS = 1500
GIGABYTES = 4
QUOTA = 60
PATIENCE = 300  # seconds for one start; the loss of a process is detected after 40 to 100
# Functions at whose calls a signal may come, and the number of their calls in a run.
PLACES = {
    'vit_jax.training.run:resolve': 1,
    'vit_jax.workdir.record:begun': 1,
    'vit_jax.workdir.lock:reserve': 1,
    'vit_jax.parallel.sharding:make_mesh': 1,
    'vit_jax.training.run_data:open_data': 1,
    'vit_jax.training.run_memory:program_that_fits': 1,
    'vit_jax.training.program:Program.initial_state': 1,
    'vit_jax.data.pipeline:train_batches': 1,
    'vit_jax.training.announcement:announce': 1,
    'vit_jax.training.run:initial_or_restored': 1,
    'vit_jax.training.program:Program.trace_train_step': 1,
    'vit_jax.workdir.record:write_json': 2,
    'vit_jax.workdir.checkpoint:Checkpointer.save': 6,
    'vit_jax.training.loop:evaluate': 3,
    'vit_jax.workdir.checkpoint:Checkpointer.restore_latest': 1,
    'vit_jax.workdir.checkpoint:Checkpointer.wait': 1,
    'vit_jax.workdir.checkpoint:Checkpointer.close': 1,
    'vit_jax.workdir.curves:draw': 3,
    'vit_jax.workdir.metrics:MetricsLog.write': 12,
    'vit_jax.workdir.metrics:MetricsLog.sync': 6,
    'vit_jax.workdir.interrupts:Interrupts.anywhere': 24,
    'vit_jax.workdir.outputs:Outputs.conclude': 1,
}
SIGNALS = ('SIGKILL', 'SIGKILL', 'SIGTERM', 'SIGINT')


# Texts in the last line of a run that was stopped or was complete.
_LAST_LINES = ('To continue', 'done:', 'the run is complete', 'Stopped by SIGINT')


def arm(place, call, delay, name):
    """Sends this process a signal, `delay` seconds after the call number `call` of a function."""
    module, _, path = place.partition(':')
    owner = importlib.import_module(module)
    *parents, last = path.split('.')
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, last)
    calls = itertools.count(1)

    def armed(*arguments, **keywords):
        if next(calls) == call:
            threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, name))).start()
        return original(*arguments, **keywords)

    setattr(owner, last, armed)


def prepare(bases):
    for number in (1, 2):
        logs, codes = start(bases / f'full{number}', number)
        if any(codes):
            raise RuntimeError(f'the run cannot be made: {logs}')


def draw(rng, bases):
    number = rng.choice((1, 1, 1, 1, 2))
    changes = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.choice(sorted(PLACES))
        changes.append(
            (
                'kill',
                rng.randrange(number),
                place,
                rng.randint(1, PLACES[place]),
                rng.choice((0, 0, 0.003, 0.03, 0.2)),
                rng.choice(SIGNALS),
            )
        )
    return f'full{number}', changes


def make(case, bases):
    """Does nothing: the run starts in an empty directory."""


def start(workdir, number, kill=None):
    """Starts the run once and returns (logs, exit codes) of its processes."""
    port = free_port()
    starts = []
    for i in range(number):
        options = []
        if number > 1:
            options = [
                f'--coordinator=127.0.0.1:{port}',
                f'--num_processes={number}',
                f'--process_id={i}',
                '--start_timeout=60',
            ]
        first = ''
        if kill and kill[0] == i:
            first = f'from tests.campaign import kills\nkills.arm(*{kill[1:]!r})\n'
        starts.append(
            functools.partial(
                Forked,
                [*arguments(workdir, fields=runs.FIELDS), *options],
                code=first + MAIN,
                optimized=False,
                explain_after=PATIENCE - 10,
            )
        )
    pathlib.Path(workdir).mkdir(exist_ok=True)
    with Processes(pathlib.Path(workdir).with_name('logs'), starts) as processes:
        for i, process in enumerate(processes.all):
            (pathlib.Path(workdir).with_name('logs') / f'{i}.log').touch()
            try:
                process.wait(PATIENCE)
            except Exception as error:
                raise Failure('hang', f'process {i}: {processes.log(i)[-5000:]}') from error
        return [processes.log(i) for i in range(number)], [p.returncode for p in processes.all]


def check(case, bases):
    number = int(case.base[-1])
    workdir = pathlib.Path('runs').resolve()
    for _, *kill in case.changes:
        _reset_logs()
        logs, codes = start(workdir, number, kill)
        for log, code in zip(logs, codes, strict=True):
            _require_end(log, code, logs)
    _reset_logs()
    logs, codes = start(workdir, number)
    if any(codes):
        raise Failure('does not go on', f'{codes}: {logs[0][-300:]}')
    runs.require_equal(workdir, bases / case.base)
    return 'equal'


def _reset_logs():
    for path in pathlib.Path('logs').glob('*.log'):
        path.unlink()


def _require_end(log, code, logs):
    """Raises Failure unless a process was complete, or ended by the signal with a message.

    Only the first of several processes logs the message, so all `logs` are searched.
    """
    lost_another = len(logs) > 1 and code in (1, -signal.SIGABRT)
    if not lost_another or 'Traceback (most' in log:  # JAX's service reports a lost process in C++
        cases.require_no_noise(log)
    codes = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 143, 130)
    if code not in codes and not lost_another:
        raise Failure('abort', f'exit code {code}: {log[-300:]}')
    all_logs = '\n'.join(logs)
    if code in (143, 130) and not any(text in all_logs for text in _LAST_LINES):
        raise Failure('no message', f'exit code {code}: {log[-300:]}')
