"""Photos that change during a run, or between two starts.

Between two starts: if the names, sizes and labels of all images are unchanged, the run resumes with
equal bits; otherwise it is refused. During a run: the run ends with finite values or with one
message; it may also wait for a pipe until a signal ends it. A damaged photo in the cache of
dataset.cache is made again, or the run has one message.
"""

import os
import pathlib
import shutil
import signal
import threading
import time

import numpy as np
from PIL import Image

from tests.campaign import cases, commands, mutate, runs
from tests.campaign.cases import Failure
from tests.support.forked import Forked

SECONDS = 600
GIGABYTES = 4
QUOTA = 60
PATIENCE = 120  # seconds for one start
PATIENCE_WITH_PIPE = 30  # seconds if the run may wait for a pipe
LIMIT = 10  # seconds from a signal to the end of a waiting run
CLASSES = ('ant', 'bee', 'cat')
FIELDS = runs.FIELDS | {
    'batch_size': 16,
    'dataset.name': 'data',
    'dataset.max_broken_fraction': 0.05,
}
# Fields of the bases, which are half-done runs, each with a full run for comparison.
BASES = {
    'splits': {},
    'slices': {'dataset.train_split': 'train[:80%]', 'dataset.eval_split': 'train[80%:]'},
    'cache': {'dataset.cache': 'disk', 'dataset.cache_dir': 'cache'},
}
# Changes that keep names, sizes and labels. The program does not notice other pixels in a file of
# the same size, so no case tries that.
KEEPING = ('touch', 'link', 'copy', 'hidden', 'no image')
CHANGING = (
    'rename',
    'move',
    'exchange',
    'replace',
    'shorten',
    'empty',
    'remove',
    'add',
    'remove and add',
    'rename class',
    'add class',
    'pipe',
    'directory',
    'dangling',
)
# A device is in none of them: TensorFlow reads an endless device until the memory is used up, and
# a check before every read makes the input 1.2 times as slow (docs/lab-notes/reliability.md).
DURING = (
    'rewrite',
    'rewrite slowly',
    'replace',
    'shorten',
    'empty',
    'garbage',
    'remove',
    'remove all',
    'pipe',
    'directory',
    'rename class',
)
PLACES = (
    'vit_jax.training.run_memory:program_that_fits',
    'vit_jax.data.pipeline:train_batches',
    'vit_jax.workdir.metrics:MetricsLog.write',
    'vit_jax.training.loop:evaluate',
    'vit_jax.workdir.checkpoint:Checkpointer.save',
)


def prepare(bases):
    write_photos(bases / 'data/train', 24, seed=1)
    write_photos(bases / 'data/test', 6, seed=2)
    here = os.getcwd()
    os.chdir(bases)  # the paths in the fields are relative to it
    for name, fields in BASES.items():
        for done, steps in (('half', runs.HALF), ('full', runs.STEPS)):
            if (name, done) == ('cache', 'half'):
                continue  # `make` trains it in the working directory
            workdir = f'{name}-{done}'
            argv = commands.training(workdir, FIELDS | fields | {'num_steps': steps})
            if Forked(argv, 'log', optimized=False).wait():
                raise RuntimeError(f'the run cannot be made: {pathlib.Path("log").read_text()}')
    os.chdir(here)


def write_photos(folder, per_class, seed):
    """Writes pictures of noise with files of different sizes, also between classes."""
    rng = np.random.default_rng(seed)
    for k, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = rng.integers(0, 255, (16 + i, 17 + k, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f'{i:03}.png')


def draw(rng, bases):
    base = rng.choice(list(BASES))
    photo = rng.randrange(1 << 30)
    if rng.random() < 0.4:
        when = ('during', rng.choice(PLACES), rng.choice((1, 1, 2, 3)))
        return base, [when, *_changes(rng, DURING, photo, base)]
    if base == 'cache' and rng.random() < 0.7:
        operation, seed = mutate.draw_in_place(rng, 0.5)
        return base, [('between',), ('kept', photo, operation, seed)]
    kinds = KEEPING if rng.random() < 0.3 else CHANGING
    return base, [('between',), *_changes(rng, kinds, photo, base)]


def _changes(rng, kinds, photo, base):
    number = rng.choice((1, 1, 1, 2))
    splits = ('train',) if base == 'slices' else ('train', 'train', 'test')
    return [(rng.choice(kinds), rng.choice(splits), photo + k) for k in range(number)]


def make(case, bases):
    shutil.copytree(bases / 'data', 'data')
    when, *changes = case.changes
    if when[0] == 'during':
        return
    if case.base == 'cache':  # the cache identifies photos by path and time
        argv = commands.training('runs', FIELDS | BASES['cache'] | {'num_steps': runs.HALF})
        if commands.end(commands.start(argv, 'main'), commands.patience(PATIENCE)):
            raise RuntimeError(f'the run cannot be made: {commands.log()}')
        os.unlink(commands.LOG)
    else:
        shutil.copytree(bases / f'{case.base}-half', 'runs')
    apply_all(changes)


def apply_all(changes):
    """Applies all changes of a case to the current directory."""
    for operation, *parameters in changes:
        apply(operation, *parameters)


def apply(operation, *parameters):
    """Applies one change of a case to the current directory."""
    if operation == 'kept':
        number, mutation, seed = parameters
        cached = sorted(pathlib.Path('cache').rglob('*.bmp'))
        mutate.in_place(cached[number % len(cached)], mutation, seed)
        return
    split, number = parameters
    photos = sorted(p for p in pathlib.Path('data', split).rglob('*.png') if p.is_file())
    if photos:
        change(operation, photos[number % len(photos)])


def change(operation, path):
    """Changes one photo, or its folder, by an operation of KEEPING, CHANGING or DURING."""
    data = path.read_bytes()
    folder = path.parent
    other = folder.parent / next(name for name in CLASSES if name != folder.name)
    if operation == 'touch':
        os.utime(path, (1, 1))
    elif operation == 'link':
        target = pathlib.Path(f'elsewhere-{folder.name}-{path.name}').absolute()
        path.rename(target)
        path.symlink_to(target)
    elif operation == 'copy':
        shutil.copy(path, 'copy.png')
        os.replace('copy.png', path)
    elif operation == 'hidden':
        (folder / '.hidden.png').write_bytes(data)
    elif operation == 'no image':
        (folder / 'notes.txt').write_text('of ants\n')
    elif operation == 'rename':
        path.rename(folder / f'new-{path.name}')
    elif operation == 'move' and other.is_dir():
        path.rename(other / f'moved-{path.name}')
    elif operation == 'exchange':
        _exchange(path, other)
    elif operation in ('replace', 'rewrite'):
        _save_another(path)
    elif operation == 'rewrite slowly':
        threading.Thread(target=_rewrite_slowly, args=(path, data), daemon=True).start()
    elif operation == 'shorten':
        path.write_bytes(data[: len(data) // 2])
    elif operation == 'garbage':
        path.write_bytes(bytes(range(256)))
    elif operation == 'remove':
        path.unlink()
    elif operation == 'remove all':
        for photo in folder.glob('*.png'):
            photo.unlink()
    elif operation == 'add':
        (folder / f'new-{path.name}').write_bytes(data)
    elif operation == 'remove and add':
        path.unlink()
        _save_another(folder / f'new-{path.name}')
    elif operation == 'rename class' and folder.is_dir():
        folder.rename(folder.with_name(f'new-{folder.name}'))
    elif operation == 'add class':
        shutil.copytree(folder, folder.with_name('zebra'), dirs_exist_ok=True)
    elif operation in ('empty', 'pipe', 'directory', 'dangling', 'device'):
        mutate.in_place(path, 'fifo' if operation == 'pipe' else operation)


def _exchange(path, other):
    """Exchanges the contents of two photos of two classes with different sizes."""
    data = path.read_bytes()
    for photo in sorted(other.glob('*.png')):
        content = photo.read_bytes()
        if len(content) != len(data):
            photo.write_bytes(data)
            path.write_bytes(content)
            return


def _save_another(path):
    """Replaces a photo atomically by another picture with another number of bytes."""
    pixels = np.random.default_rng(len(path.name)).integers(0, 255, (19, 23, 3), np.uint8)
    Image.fromarray(pixels).save('another.png')
    os.replace('another.png', path)


def _rewrite_slowly(path, data):
    """Rewrites a photo again and again, so that it is incomplete for moments."""
    for _ in range(200):
        with open(path, 'wb') as file:
            file.write(data[: len(data) // 2])
            file.flush()
            time.sleep(0.01)
            file.write(data[len(data) // 2 :])
        time.sleep(0.01)


def check(case, bases):
    when, *changes = case.changes
    argv = commands.training('runs', FIELDS | BASES[case.base])
    first = ''
    if when[0] == 'during':
        _, place, call = when
        first = (
            'from tests.campaign import datasets\n'
            f'commands.at_call({place!r}, {call}, lambda: datasets.apply_all({changes!r}))'
        )
    may_wait = any(change[0] in ('pipe', 'device') for change in changes)
    seconds = PATIENCE_WITH_PIPE if may_wait else PATIENCE
    code, needed_signal = _end(commands.start(argv, 'main', first), seconds)
    cases.require_no_noise(commands.log())
    if needed_signal:
        if not may_wait or code != 143:
            raise Failure('hang', f'exit code {code} after a signal: {commands.log()[-300:]}')
        return 'waited and ended'
    if code not in (0, 1):
        raise Failure('abort', f'exit code {code}: {commands.log()[-300:]}')
    if code:
        commands.require_one_message(commands.log())
    if when[0] == 'during':
        return _judge_finite() if code == 0 else 'refused'
    return _judge_resumed(code, changes, bases / f'{case.base}-full')


def _end(process, seconds):
    """(exit code, whether it needed a signal) of a run after some seconds."""
    try:
        code = commands.end(process, commands.patience(seconds))
        if code is not None:
            return code, False
        process.send_signal(signal.SIGTERM)
        code = commands.end(process, commands.patience(LIMIT))
        if code is None:
            raise Failure('hang', commands.stop(process))
        return code, True
    finally:
        process.kill()
        process.wait()


def _judge_finite():
    for row in runs.rows('runs'):
        if not all(np.isfinite(value) for value in row.values()):
            raise Failure('not finite', f'{row}')
    for _, array in runs.final_state('runs'):
        if not np.isfinite(np.asarray(array, np.float32)).all():
            raise Failure('not finite', 'the state after the last step')
    return 'done'


def _judge_changed_evaluation(changes):
    """The outcome of a run that resumed on changed data: only evaluation images may change."""
    splits = {change[1] for change in changes if change[0] not in KEEPING}
    has_warned = 'the evaluation images have changed' in commands.log()
    if splits != {'test'} or not has_warned:
        raise Failure('silent', f'the run resumed although data changed: {changes[0][0]}')
    return 'resumed with a warning'


def _judge_resumed(code, changes, full):
    is_cache_damaged = changes[0][0] == 'kept'
    is_data_unchanged = is_cache_damaged or all(change[0] in KEEPING for change in changes)
    if code == 0:
        if not is_data_unchanged:
            return _judge_changed_evaluation(changes)
        runs.require_equal('runs', full)
        return 'equal'
    if is_data_unchanged and not is_cache_damaged:
        raise Failure('refused', f'the data are unchanged: {commands.log()[-300:]}')
    return 'refused'
