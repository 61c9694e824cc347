"""SIGTERM and SIGINT while a command starts, compiles, waits for a file or works.

In training the first signal ends the process within 10 seconds, whatever it is doing; other
commands end within 10 seconds of the second one. They end by the signal, or with its exit code, and
nothing is printed but messages. That a run which was stopped resumes with the same bits is what
the kind `kills` shows.
"""

import pathlib
import shutil
import signal
import time

from tests.campaign import cases, commands, datasets, runs, workdirs
from tests.campaign.cases import Failure
from tests.support.datasets import write_images
from tests.support.forked import Forked
from tests.support.runs import ROOT, arguments

SECONDS, GIGABYTES, QUOTA = 600, 4, 60
LIMIT = 10  # seconds from the signal to the end
PATIENCE = 120  # seconds until a place is reached: nothing is judged then
BEGUN, REACHED = 'begun', 'reached'  # files that the process makes
# Phases of the start of a run, and of the run. A scene may not get to all of them.
START = (
    'vit_jax.training.loop:train',
    'vit_jax.workdir.record:lock',
    'vit_jax.training.run:resolve',
    'vit_jax.parallel.sharding:make_mesh',
    'vit_jax.training.run:open_data',
    'vit_jax.training.run:Program',
    'vit_jax.training.run:program_that_fits',
    'vit_jax.training.run:initial_or_restored',
    'vit_jax.training.run:announce',
    'vit_jax.training.run:make_room',
)
OF_RUN = (
    'vit_jax.training.program:Program.trace_train_step',
    'vit_jax.data.pipeline:train_batches',
    'vit_jax.workdir.metrics:MetricsLog.write',
    'vit_jax.workdir.checkpoint:Checkpointer.save',
    'vit_jax.training.loop:evaluate',
)
SPLITS = {
    'dataset.train_split': 'train[:90%]',
    'dataset.eval_split': 'train[90%:]',
    'dataset.test_split': 'test',
}
# A command, with fields for training or the arguments of others, and its places.
SCENES = {
    'new': ('main', {}, START + OF_RUN),
    'half': ('main', {}, (*START, 'vit_jax.workdir.checkpoint:Checkpointer.restore_latest')),
    'parts': ('main', {'accum_steps': 0}, START),
    'large batch': ('main', {'batch_size': 100_000, 'accum_steps': 0}, START),
    'slow to compile': (
        'main',
        {'model.num_layers': 48, 'model.unroll': 48},
        ('vit_jax.training.program:Program.trace_train_step', *START[5:]),
    ),
    'folder': ('main', {'dataset.name': 'data', 'batch_size': 16}, START + OF_RUN),
    'cache': (
        'main',
        {
            'dataset.name': 'data',
            'batch_size': 16,
            'dataset.cache': 'disk',
            'dataset.cache_dir': 'cache',
        },
        (*START, 'vit_jax.data.cached:cached', 'vit_jax.data.cached:_file_of'),
    ),
    'pipe': ('main', {'dataset.name': 'data', 'batch_size': 16}, OF_RUN[2:]),
    'pretrained': ('main', {'pretrained': 'runs'}, START[2:]),
    'predict': ('predict', ['--workdir=runs', workdirs.PICTURE], ()),
    'evaluate': ('evaluate', ['--workdir=runs'], ()),
    'convert': ('convert', ['runs', 'x.safetensors', '--to=vit_jax'], ()),
    'report': ('report', ['runs'], ()),
    'plan': ('plan', [f'--config={ROOT}/configs/quickstart.py', '--devices=8'], ()),
    'sweep': (
        'sweep',
        [
            *arguments('several', fields=runs.FIELDS | SPLITS),
            '--config.optimizer.learning_rate=0.001,0.003',
        ],
        (),
    ),
}
OF_HALF = ('half', 'pretrained', 'predict', 'evaluate', 'convert', 'report')
SIGNALS = ('SIGTERM', 'SIGINT')
# Exit codes: by the signal before a command has its own handlers, afterwards 128 + its number.
CODES = (-signal.SIGTERM, -signal.SIGINT, 143, 130)
_SAID = ('SIGTERM', 'SIGINT', 'Ctrl-C', 'stopped', 'To continue', 'done:', 'complete')


def prepare(bases):
    workdirs.save_picture(bases)
    write_images(bases / 'data/train', datasets.CLASSES, 20, seed=1)
    write_images(bases / 'data/test', datasets.CLASSES, 4, seed=2)
    fields = runs.FIELDS | {'num_steps': runs.HALF}
    if Forked(arguments(bases / 'half', fields=fields), bases / 'log', optimized=False).wait():
        raise RuntimeError(f'the run cannot be made: {(bases / "log").read_text()}')


def draw(rng, bases):
    scene = rng.choice(list(SCENES))
    places = SCENES[scene][2]
    # As a user types it, a command imports for seconds; a fork begins behind the imports.
    kind = 'fork' if rng.random() < 0.7 else 'typed'
    if scene == 'pipe':  # in which what has been read ahead must be used up first
        kind, moment = 'fork', ('place', rng.choice(places), rng.choice((1, 3)))
    elif places and kind == 'fork' and rng.random() < 0.8:
        moment = ('place', rng.choice(places), rng.choice((0, 0, 0.03, 0.3, 2)))
    else:
        moment = ('after', rng.choice((0.01, 0.1, 0.5, 1, 2, 4, 8)))
    signals = [rng.choice(SIGNALS)]
    if SCENES[scene][0] != 'main' or rng.random() < 0.4:
        signals.append('SIGINT')  # a second SIGTERM means the first, see workdir/interrupts.py
    return scene, [(kind, *moment), ('signals', rng.choice((0.01, 0.5, 1.5, 3)), *signals)]


def make(case, bases):
    shutil.copy(bases / workdirs.PICTURE, workdirs.PICTURE)
    shutil.copytree(bases / 'data', 'data')
    if case.base in OF_HALF:
        shutil.copytree(bases / 'half', 'runs')


def reach():
    """Notes that the process has reached the place of a case; the campaign sends the signal."""
    pathlib.Path(REACHED).touch()


def reach_with_pipes():
    """The same, with every training photo replaced by a pipe that nobody writes to."""
    for path in sorted(pathlib.Path('data/train').rglob('*.png')):
        datasets.change('pipe', path)
    reach()


def check(case, bases):
    module, given, _ = SCENES[case.base]
    (kind, moment, *when), (_, gap, *names) = case.changes
    process = commands.start(_arguments(case, module, given), module, _first(case, module))
    try:
        # A fork takes a moment until it runs our code; a signal before that is not the command's.
        awaited = REACHED if moment == 'place' else BEGUN
        if not commands.wait_for(awaited, process, PATIENCE):
            return 'not reached'
        time.sleep(when[-1])
        for number, name in enumerate(names):
            if number:
                commands.end(process, gap)
            process.send_signal(getattr(signal, name))
        code = commands.end(process, commands.patience(LIMIT))
        if code is None:
            written = commands.stop(process)
            raise Failure('hang', f'{case.base} {moment} {" ".join(names)}: {written}')
    finally:
        process.kill()
        process.wait()
    return _judged(code, module, kind, commands.log())


def _arguments(case, module, given):
    if module != 'main':
        return given
    workdir = 'again' if case.base == 'pretrained' else 'runs'
    # Long enough that no run ends before the signal comes.
    fields = runs.FIELDS | {'num_steps': 100_000, 'eval_every': 20, 'checkpoint_every': 10}
    if case.base == 'half':
        fields = runs.FIELDS
    return commands.training(workdir, fields | given)


def _first(case, module):
    """The code that runs before the command."""
    kind, moment, *when = case.changes[0]
    lines = [f'import pathlib; from vit_jax import {module}; pathlib.Path({BEGUN!r}).touch()']
    cache = case.base != 'slow to compile'  # which would be fast in the second case
    if not cache:
        lines.append('import jax; jax.config.update("jax_enable_compilation_cache", False)')
    if kind == 'typed':
        variable = f'JAX_ENABLE_COMPILATION_CACHE={str(cache).lower()!r}'
        lines.append(f'commands.as_typed({module!r}, {variable})')
    elif moment == 'place':
        reach_here = 'reach_with_pipes' if case.base == 'pipe' else 'reach'
        lines.append(
            'from tests.campaign import signals; '
            f'commands.at_call({when[0]!r}, 1, signals.{reach_here})'
        )
    return '\n'.join(lines)


def _judged(code, module, kind, written):
    if kind == 'typed' and code == -signal.SIGINT and written.endswith('KeyboardInterrupt\n'):
        return 'ended while it was imported'  # as every program of Python, with a traceback
    cases.require_no_noise(written)
    if code == 0:
        return 'done'
    if code == 1:  # as a batch that is larger than the split
        commands.require_one_message(written)
        return 'refused'
    if code not in CODES:
        raise Failure('abort', f'exit code {code}: {written[-300:]}')
    if module == 'main' and code > 0 and not any(word in written for word in _SAID):
        raise Failure('no message', f'exit code {code}: {written[-300:]}')
    return 'ended'
