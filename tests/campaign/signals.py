"""SIGTERM and SIGINT while a command starts, compiles, waits for a file or works.

A training process ends within 10 seconds of the first signal, other commands within 10 seconds of
the second one. They end by the signal or with its exit code, and print only messages. The kind
`kills` tests that stopped runs resume bit-identically.
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

SECONDS = 600
GIGABYTES = 4
QUOTA = 60
LIMIT = 10  # seconds from the signal to the end
PATIENCE = 120  # seconds to reach a place; a case that does not reach it has no failure
# Files that the process makes.
BEGUN = 'begun'
REACHED = 'reached'
# Phases of the start of a run, and of the run. Not every scene reaches all of them.
START = (
    'vit_jax.training.loop:train',
    'vit_jax.workdir.lock:reserve',
    'vit_jax.training.run:resolve',
    'vit_jax.parallel.sharding:make_mesh',
    'vit_jax.training.run_data:open_data',
    'vit_jax.training.run:Program',
    'vit_jax.training.run_memory:program_that_fits',
    'vit_jax.training.run:initial_or_restored',
    'vit_jax.training.announcement:announce',
    'vit_jax.training.run_memory:make_room',
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
# (command, fields of training or arguments of another command, its places).
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
# Exit codes: minus the signal before a command has its own handlers, then 128 + the signal.
CODES = (-signal.SIGTERM, -signal.SIGINT, 143, 130)
_MESSAGES = ('SIGTERM', 'SIGINT', 'Ctrl-C', 'stopped', 'To continue', 'done:', 'complete')


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
    # A command that a user types imports for seconds. A fork starts after the imports.
    kind = 'fork' if rng.random() < 0.7 else 'typed'
    if scene == 'pipe':  # the run first uses up the images that it has read ahead
        kind = 'fork'
        moment = ('place', rng.choice(places), rng.choice((1, 3)))
    elif places and kind == 'fork' and rng.random() < 0.8:
        moment = ('place', rng.choice(places), rng.choice((0, 0, 0.03, 0.3, 2)))
    else:
        moment = ('after', rng.choice((0.01, 0.1, 0.5, 1, 2, 4, 8)))
    signals = [rng.choice(SIGNALS)]
    if SCENES[scene][0] != 'main' or rng.random() < 0.4:
        signals.append('SIGINT')  # a second SIGTERM has no effect, see workdir/interrupts.py
    return scene, [(kind, *moment), ('signals', rng.choice((0.01, 0.5, 1.5, 3)), *signals)]


def make(case, bases):
    shutil.copy(bases / workdirs.PICTURE, workdirs.PICTURE)
    shutil.copytree(bases / 'data', 'data')
    if case.base in OF_HALF:
        shutil.copytree(bases / 'half', 'runs')


def reach():
    """Tells the campaign that the process has reached the place of the signal."""
    pathlib.Path(REACHED).touch()


def reach_with_pipes():
    """Replaces every training photo by a pipe without a writer, then calls `reach`."""
    for path in sorted(pathlib.Path('data/train').rglob('*.png')):
        datasets.change('pipe', path)
    reach()


def check(case, bases):
    module, options, _ = SCENES[case.base]
    (kind, moment, *when), (_, gap, *names) = case.changes
    process = commands.start(_arguments(case, module, options), module, _first(case, module))
    try:
        # A fork needs a moment before it runs our code. An earlier signal would miss it.
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


def _arguments(case, module, options):
    if module != 'main':
        return options
    workdir = 'again' if case.base == 'pretrained' else 'runs'
    # No run is complete before the signal comes.
    fields = runs.FIELDS | {'num_steps': 100_000, 'eval_every': 20, 'checkpoint_every': 10}
    if case.base == 'half':
        fields = runs.FIELDS
    return commands.training(workdir, fields | options)


def _first(case, module):
    """The code that runs before the command."""
    kind, moment, *when = case.changes[0]
    lines = [f'import pathlib; from vit_jax import {module}; pathlib.Path({BEGUN!r}).touch()']
    cache = case.base != 'slow to compile'  # with the cache, the second case would compile fast
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
    if kind == 'typed' and code in (-signal.SIGINT, 1) and 'KeyboardInterrupt' in written[-300:]:
        return 'ended while it was imported'  # like every program of Python, with a traceback
    cases.require_no_noise(written)
    if code == 0:
        return 'done'
    if code == 1:  # for example a batch that is larger than the split
        commands.require_one_message(written)
        return 'refused'
    if code not in CODES:
        raise Failure('abort', f'exit code {code}: {written[-300:]}')
    if module == 'main' and code > 0 and not any(text in written for text in _MESSAGES):
        raise Failure('no message', f'exit code {code}: {written[-300:]}')
    return 'ended'
