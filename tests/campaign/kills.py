"""Real runs, of one process or of two, that are killed at any phase and then go on.

A signal comes at a call of a function that a phase begins with, or a moment later. In the end the
run must have the bits of one that nothing happened to.
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

SECONDS, GIGABYTES, QUOTA = 1500, 4, 60
PATIENCE = 300  # seconds for one start; a lost process is noticed after 40 to 100
# Where a signal may come, and how often a run gets there.
PLACES = {
    'vit_jax.training.run:resolve': 1,
    'vit_jax.workdir.record:begun': 1,
    'vit_jax.workdir.record:lock': 1,
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


# The last line of a run that was stopped, was about to end, or had ended before.
_SAID = ('To continue', 'done:', 'the run is complete')


def arm(place, call, delay, name):
    """Lets a signal come to this process, `delay` seconds after a call of a function."""
    module, _, path = place.partition(':')
    owner = importlib.import_module(module)
    *parents, last = path.split('.')
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, last), itertools.count(1)

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
    number, changes = rng.choice((1, 1, 1, 1, 2)), []
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
    """Nothing: the run begins anew."""


def start(workdir, number, kill=None):
    """Starts the run once: (logs, exit codes) of its processes."""
    port, starts = free_port(), []
    for i in range(number):
        options = (
            [
                f'--coordinator=127.0.0.1:{port}',
                f'--num_processes={number}',
                f'--process_id={i}',
                '--start_timeout=60',
            ]
            if number > 1
            else []
        )
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
    number, workdir = int(case.base[-1]), pathlib.Path('runs').resolve()
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
    """Raises Failure unless a process ended by the signal, saved and said so, or was complete.

    Of several processes, `logs`, only the first may have said it.
    """
    lost = len(logs) > 1 and code in (1, -signal.SIGABRT)  # the other process was
    if not lost or 'Traceback (most' in log:  # JAX's service says in C++ which process was lost
        cases.require_no_noise(log)
    if code not in (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 143, 130) and not lost:
        raise Failure('abort', f'exit code {code}: {log[-300:]}')
    if code in (143, 130) and not any(word in x for x in logs for word in _SAID):
        raise Failure('no message', f'exit code {code}: {log[-300:]}')
