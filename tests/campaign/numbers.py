"""Extremes of every number of a config: what float32 and whole numbers of 32 bits hold, and more.

A run of a few steps with such a value ends with numbers that are finite, or with one message. Only
a value that makes steps large may let training diverge.
"""

import functools
import json
import math
import os
import pathlib
import signal
from unittest import mock

import numpy as np

from tests.campaign import configs, datasets, runs
from tests.campaign.cases import Failure
from tests.support.datasets import write_images
from tests.support.forked import Forked
from tests.support.runs import RANDOM, arguments
from vit_jax import config as config_lib

SECONDS, GIGABYTES, QUOTA = 90, 4, 120
STEPS = 3
TEACHER = 'teacher'
FIELDS = RANDOM | {
    'num_steps': STEPS,
    'eval_every': 0,
    'checkpoint_every': 0,
    'batch_size': 8,
    'optimizer.warmup_steps': 1,
}
FLOATS = (
    '1.4e-45',  # the smallest number above 0 that float32 holds, which is subnormal
    '1e-40',
    '1.17549435e-38',  # the smallest one that is not
    '1e-46',  # float64 holds these, and float32 has 0 or infinity for them
    '5e-324',
    '1e-300',
    '3.4028235e38',  # the largest one of float32
    '3.5e38',
    '1e300',
    '1.7976931348623157e308',
    '1e-8',
    '5.9604645e-08',  # the difference of 1 and the number below it
    '0.99999994',  # that number
    '0.9999999999999999',  # float32 has 1 for it
    '1.0000001',
    '16777217',  # the first whole number that float32 does not hold
    '0',
    '1',
)
INTEGERS = (0, 1, 2, 2**15, 2**16, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1)
# How long a run is and what it repeats: large ones would be right, and take for ever.
LEFT_OUT = (
    'batch_size',
    'evals.fewshot.seeds',
    'mesh.host_devices',
    'model.num_layers',
    'model.unroll',
    'teacher.checksum',
    'dataset.num_examples',
    'dataset.num_classes',
)
# What must be set for a field to count, by the beginning of its name.
WITH = {
    'augment.randaugment.': {'augment.randaugment.num_ops': 4},
    'augment.pad': {'augment.crop': 'pad'},
    'augment.crop_ratio': {'augment.crop': 'resize'},
    'teacher.': {'teacher.weights': TEACHER},
    'masked.': {'masked.target': 'mean_color', 'augment.mixup': 0},
    'optimizer.momentum': {'optimizer.name': 'sgd'},
    'optimizer.timescale': {'optimizer.schedule': 'rsqrt'},
    'optimizer.staircase': {'optimizer.schedule': 'staircase'},
    'optimizer.end_learning_rate': {'optimizer.schedule': 'linear'},
    'optimizer.cooldown_steps': {'optimizer.schedule': 'rsqrt'},
    'evals.fewshot.': {'evals.fewshot.shots': '1,2', 'evals.fewshot.seeds': 1},
    'dataset.cache_size': {'dataset.cache': 'disk', 'dataset.cache_dir': 'cache'},
}
# With these the steps themselves may become too large.
MAY_DIVERGE = ('optimizer.', 'loss.class_weights', 'model.head_bias_init', 'model.', 'ema_decay')


def prepare(bases):
    write_images(bases / 'data/train', datasets.CLASSES, 12, seed=1)
    write_images(bases / 'data/test', datasets.CLASSES, 4, seed=2)
    here = os.getcwd()
    os.chdir(bases)
    fields = FIELDS | {'dataset.name': 'data'}
    if Forked(arguments(TEACHER, fields=fields), 'log', optimized=False).wait():
        raise RuntimeError(f'the teacher cannot be made: {pathlib.Path("log").read_text()}')
    os.chdir(here)


@functools.cache
def _fields():
    """The numeric fields: 'whole', 'number', or 'several' numbers, by name."""
    kinds = {}
    given = config_lib.flatten(config_lib.base())
    for name, field in config_lib.all_fields().items():
        if name.startswith(LEFT_OUT) or name not in given:
            continue
        if field.values.fits((0.5, 0.5, 0.5)) or field.values.fits((1, 1, 1)):
            kinds[name] = 'several'
        elif field.values.fits(1):
            whole = isinstance(field.default, int) or not field.values.fits(0.5)
            kinds[name] = 'whole' if whole else 'number'
        elif field.values.fits(0.5):
            kinds[name] = 'number'
    return kinds


def draw(rng, bases):
    kinds = _fields()
    name = rng.choice(sorted(kinds))
    if kinds[name] == 'whole':
        value = str(rng.choice(INTEGERS))
    elif kinds[name] == 'number':
        value = rng.choice(FLOATS)
    else:
        value = ','.join([rng.choice((*FLOATS, *map(str, INTEGERS)))] * 3)
    if rng.random() < 0.1:
        value = f'-{value}'
    return 'run', [('set', name, value)]


def make(case, bases):
    """Nothing: the data and the teacher are in the base."""


def check(case, bases):
    from vit_jax import main
    from vit_jax.errors import DivergedError
    from vit_jax.workdir import outputs

    _, name, value = case.changes[0]
    fields = FIELDS | {'dataset.name': bases / 'data'}
    for beginning, needed in WITH.items():
        if name.startswith(beginning):
            fields = fields | needed
    if 'teacher.weights' in fields:
        fields['teacher.weights'] = bases / TEACHER
    if name in ('num_steps', 'num_epochs'):
        fields |= {'num_steps': 0, 'num_epochs': 0}
    argv = [*arguments('runs', fields=fields | {name: value}), '--num_processes=1']
    diverged = []

    class Noted(DivergedError):
        def __init__(self, message):
            super().__init__(message)
            diverged.append(message)

    with (
        mock.patch.object(outputs, 'DivergedError', Noted),
        mock.patch('vit_jax.training.loop.Interrupts.anywhere', _stops_after(STEPS + 2)),
    ):
        word, _ = command(main.main, argv)
    if word == 'refused':
        if diverged and not name.startswith(MAY_DIVERGE):
            raise Failure('misled', f'{name}={value} is called divergence: {diverged[0][:200]}')
        return 'diverged' if diverged else 'refused'
    return _judge_finite()


def command(function, argv):
    """As configs.command, of a run that a signal may stop."""
    stopped = []

    def main(given):
        code = function(given)
        if code == 128 + signal.SIGTERM:
            stopped.append(code)
            return 0
        return code

    word, lines = configs.command(main, argv)
    return 'stopped' if stopped else word, lines


def _stops_after(calls):
    """Stands for Interrupts.anywhere, with a signal when a long run has taken some steps."""
    count = []

    def anywhere(self):
        count.append(1)
        if len(count) > calls and _is_long():
            self.received = signal.SIGTERM
        return self.received is not None

    return anywhere


def _is_long():
    recorded = pathlib.Path('runs/config.json')
    return recorded.exists() and json.loads(recorded.read_text())['num_steps'] != STEPS


def _judge_finite():
    for row in runs.rows('runs'):
        for metric, value in row.items():
            if not math.isfinite(value):
                raise Failure('not finite', f'{metric} in metrics.jsonl')
    newest = max(int(path.name) for path in pathlib.Path('runs/checkpoints').iterdir())
    for _, array in runs.final_state('runs', newest):
        if not np.isfinite(np.asarray(array, np.float32)).all():
            raise Failure('not finite', 'the state after the last step')
    return 'finite'
