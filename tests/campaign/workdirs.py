"""Files of a workdir of a run that is half done, damaged; then the run goes on, or is used.

A run that goes on must end with the bits of one that nothing happened to.
"""

import contextlib
import io
import json
import pathlib
import shutil

import numpy as np
from PIL import Image

from tests.campaign import configs, mutate, runs, weights
from tests.campaign.cases import Failure
from vit_jax import weights as weights_lib

SECONDS, GIGABYTES, QUOTA = 60, 4, 300
PICTURE = 'picture.png'
USES = ('train', 'train', 'train', 'load', 'predict', 'evaluate')


def prepare(bases):
    save_picture(bases)
    for name, steps in (('half', runs.HALF), ('full', runs.STEPS)):
        if runs.train_here(bases / name, steps) is None:
            raise RuntimeError(f'the run cannot be made: {name}')


def save_picture(bases):
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(bases / PICTURE)


def draw(rng, bases):
    half = bases / 'half'
    files = sorted(str(path.relative_to(half)) for path in half.rglob('*') if path.is_file())
    top = [name for name in files if '/' not in name]
    return 'half', [
        ('use', rng.choice(USES)),
        *(
            (rng.choice(top if rng.random() < 0.5 else files), *mutate.draw_in_place(rng, 0.6))
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ),
    ]


def make(case, bases):
    shutil.copytree(bases / 'half', 'runs')
    for name, operation, *parameters in case.changes:
        path = pathlib.Path('runs', name)
        if name != 'use' and path.exists() and path.parent.is_dir():
            mutate.in_place(path, operation, *parameters)


def check(case, bases):
    return globals()[f'_{case.changes[0][1]}'](case, bases)


def _train(case, bases):
    lines = runs.train_here('runs')
    if lines is None:
        return 'refused'
    said = any('metrics.jsonl' in line for line in lines if not line.startswith('done'))
    runs.require_equal('runs', bases / 'full', rows_too=not said)
    return 'equal'


def _load(case, bases):
    weights.check_model(weights_lib.load('runs'))
    return 'loaded'


def _predict(case, bases):
    from vit_jax import predict

    return _json(predict.main, ['--workdir=runs', '--json', str(bases / PICTURE)])


def _evaluate(case, bases):
    from vit_jax import evaluate

    return _json(evaluate.main, ['--workdir=runs', '--json', '--split=test[:5%]'])


def _json(function, argv):
    """What comes of a command whose last line on stdout is JSON."""

    def refuse(name):
        raise Failure('silent', f'{name} in JSON')

    with contextlib.redirect_stdout(io.StringIO()) as output:
        word, _ = configs.command(function, argv)
    if word == 'done':
        json.loads(output.getvalue().splitlines()[-1], parse_constant=refuse)
    return word
