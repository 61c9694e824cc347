"""Workdirs of half-done runs that are damaged or edited before the run resumes or is used.

Cases damage files, edit values of config.json within its format, and rename, exchange and copy
folders of checkpoints. A resumed run must end bit-identical to an uninterrupted run. Loaded weights
must belong to the step that their source names.
"""

import contextlib
import io
import json
import os
import pathlib
import random
import shutil

import numpy as np
from PIL import Image

from tests.campaign import configs, mutate, runs, weights
from tests.campaign.cases import Failure
from vit_jax import config as config_lib
from vit_jax import weights as weights_lib
from vit_jax.errors import UserError

SECONDS = 60
GIGABYTES = 4
QUOTA = 350
PICTURE = 'picture.png'
USES = ('train', 'train', 'train', 'load', 'predict', 'evaluate', 'convert')
CONFIG = 'config.json'
FOLDERS = 'checkpoints'
# New names for the folder of a checkpoint. int() accepts digits of other scripts.
NAMES = (
    '{step}0',
    '0',
    '1',
    '0{step}',
    '-{step}',
    '\u00b2',
    '\u0668',
    'bad-{step}',
    '{step}.tmp',
    'x',
)


def prepare(bases):
    save_picture(bases)
    for name, steps in (('half', runs.HALF), ('full', runs.STEPS)):
        if runs.train_here(bases / name, steps) is None:
            raise RuntimeError(f'the run cannot be made: {name}')


def save_picture(bases):
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(bases / PICTURE)


def draw(rng, bases):
    half = bases / 'half'
    use = ('use', rng.choice(USES))
    kind = rng.random()
    if kind < 0.2:
        number = rng.choice((1, 1, 1, 2))
        return 'half', [use, *((CONFIG, 'edit', rng.randrange(1 << 30)) for _ in range(number))]
    if kind < 0.35:
        return 'half', [use, _draw_folders(rng, half)]
    files = sorted(str(path.relative_to(half)) for path in half.rglob('*') if path.is_file())
    top = [name for name in files if '/' not in name]
    return 'half', [
        use,
        *(
            (rng.choice(top if rng.random() < 0.5 else files), *mutate.draw_in_place(rng, 0.6))
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ),
    ]


def _draw_folders(rng, half):
    steps = sorted(path.name for path in (half / FOLDERS).iterdir())
    step, other = rng.sample(steps, 2)
    operation = rng.choice(('exchange', 'exchange', 'rename', 'rename', 'copy', 'remove'))
    name = other if operation == 'exchange' else rng.choice(NAMES).format(step=step)
    return (FOLDERS, operation, step, name)


def make(case, bases):
    shutil.copytree(bases / 'half', 'runs')
    for name, operation, *parameters in case.changes:
        path = pathlib.Path('runs', name)
        if name == FOLDERS:
            _change_folders(path, operation, *parameters)
        elif operation == 'edit':
            config = json.loads(path.read_text())
            edit(config, random.Random(*parameters))
            path.write_text(json.dumps(config))
        elif name != 'use' and path.exists() and path.parent.is_dir():
            mutate.in_place(path, operation, *parameters)


def _change_folders(folder, operation, step, name):
    """Renames, copies, removes or exchanges the folders of checkpoints."""
    if operation == 'remove':
        shutil.rmtree(folder / step)
    elif operation == 'copy':
        shutil.copytree(folder / step, folder / name)
    elif operation == 'rename':
        os.rename(folder / step, folder / name)
    else:
        os.rename(folder / step, folder / 'third')
        os.rename(folder / name, folder / step)
        os.rename(folder / 'third', folder / name)


def edit(config, rng):
    """Changes one value of a config to another value of the same type, as a user might."""
    # An earlier edit may have removed or emptied a section.
    sections = [name for name, value in config.items() if isinstance(value, dict) and value]
    section = config
    if rng.random() < 0.6 and sections:
        section = config[rng.choice(sections)]
    if rng.random() < 0.3 and config.get('model'):
        section = config['model']
    name = rng.choice(sorted(section))
    if rng.random() < 0.15:
        del section[name]
    elif rng.random() < 0.1 and section is not config:
        section.clear()
    else:
        section[name] = _edited(section[name], rng, name)


def _edited(value, rng, name):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, value // 2, 0, 1, 3))
    if isinstance(value, float):
        return rng.choice((value * 1.1, value / 2, 0.0, 1.0, 0.25))
    if isinstance(value, str):
        choices = [
            choice
            for field, about in config_lib.all_fields().items()
            if field.rpartition('.')[2] == name
            for choice in about.values.choices
        ]
        return rng.choice([*choices, '', 'train', 'x'])
    if isinstance(value, list):
        return rng.choice(([*value, *value[:1]], value[1:], [_edited(x, rng, name) for x in value]))
    if isinstance(value, dict):
        changed = dict(value)
        for key in sorted(value)[:1]:
            changed[key] = _edited(value[key], rng, key)
        return changed
    return rng.choice((0, 1, 16, 'x', [1, 2]))  # instead of null


def check(case, bases):
    return globals()[f'_{case.changes[0][1]}'](case, bases)


def _train(case, bases):
    lines = runs.train_here('runs')
    if lines is None:
        return 'refused'
    has_warned = any('metrics.jsonl' in line for line in lines if not line.startswith('done'))
    runs.require_equal('runs', bases / 'full', rows_too=not has_warned)
    return 'equal'


def _load(case, bases):
    loaded = weights_lib.load('runs')
    weights.check_model(loaded)
    _require_step(loaded, bases)
    return 'loaded'


def _require_step(loaded, bases):
    """Raises Failure unless the weights belong to the step that their source names."""
    step = os.path.basename(loaded.source)
    intact = bases / 'half' / FOLDERS / step
    if not intact.is_dir():
        raise Failure('silent', f'weights of a step that was not saved: {step!r}')
    expected = weights.flatten(weights_lib.load(str(intact)).params)
    arrays = weights.flatten(loaded.params)
    for name, array in expected.items():
        if np.asarray(array).tobytes() != np.asarray(arrays[name]).tobytes():
            raise Failure('silent', 'the weights belong to another step than their source names')


def _convert(case, bases):
    from vit_jax import convert

    word, _ = configs.command(convert.main, ['runs', 'x.safetensors', '--to=vit_jax'])
    if word == 'done':
        try:
            loaded = weights_lib.load('x.safetensors')
        except UserError as error:
            raise Failure('silent', f'convert wrote a file that cannot be read: {error}') from error
        weights.check_model(loaded)
    return word


def _predict(case, bases):
    from vit_jax import predict

    return _json(predict.main, ['--workdir=runs', '--json', str(bases / PICTURE)])


def _evaluate(case, bases):
    from vit_jax import evaluate

    return _json(evaluate.main, ['--workdir=runs', '--json', '--split=test[:5%]'])


def _json(function, argv):
    """The result of a command whose last line on stdout is JSON."""

    def refuse(name):
        raise Failure('silent', f'{name} in JSON')

    with contextlib.redirect_stdout(io.StringIO()) as output:
        word, _ = configs.command(function, argv)
    if word == 'done':
        json.loads(output.getvalue().splitlines()[-1], parse_constant=refuse)
    return word
