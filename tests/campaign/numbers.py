"""Extreme values of every number in a config, in and beyond the ranges of float32 and int32.

A run of a few steps with such a value ends with finite numbers or with one message. Training may
diverge only with a value that makes steps large.
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

SECONDS = 90
GIGABYTES = 4
QUOTA = 120
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
    '1.4e-45',  # the smallest positive float32, subnormal
    '1e-40',
    '1.17549435e-38',  # the smallest normal float32
    '1e-46',  # this and the next two are 0 in float32
    '5e-324',
    '1e-300',
    '3.4028235e38',  # the largest float32
    '3.5e38',  # this and the next two are infinite in float32
    '1e300',
    '1.7976931348623157e308',
    '1e-8',
    '5.9604645e-08',  # 1 minus the largest float32 below 1
    '0.99999994',  # the largest float32 below 1
    '0.9999999999999999',  # 1 in float32
    '1.0000001',
    '16777217',  # the first integer that float32 cannot represent
    '0',
    '1',
)
INTEGERS = (0, 1, 2, 2**15, 2**16, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1)
# Lengths and repetitions: a large value is valid, and the run would take too long.
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
# Further settings that a field needs to have an effect, by the beginning of its name.
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
# These fields may make the steps too large.
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
    """The kinds of the numeric fields by name: 'whole', 'number', or 'several' numbers."""
    kinds = {}
    base = config_lib.flatten(config_lib.base())
    for name, field in config_lib.all_fields().items():
        if name.startswith(LEFT_OUT) or name not in base:
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
        number = rng.choice((*FLOATS, *map(str, INTEGERS)))
        value = ','.join([number, number, number])
    if rng.random() < 0.1:
        value = f'-{value}'
    return 'run', [('set', name, value)]


def make(case, bases):
    """Does nothing: the data and the teacher are in the base."""


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

    class RecordedError(DivergedError):
        def __init__(self, message, **attributes):
            super().__init__(message, **attributes)
            diverged.append(message)

    with (
        mock.patch.object(outputs, 'DivergedError', RecordedError),
        mock.patch('vit_jax.training.loop.Interrupts.anywhere', _stops_after(STEPS + 2)),
    ):
        word, _ = command(main.main, argv)
    if word == 'refused':
        if diverged and not name.startswith(MAY_DIVERGE):
            raise Failure('misled', f'{name}={value} is reported as: {diverged[0][:200]}')
        return 'diverged' if diverged else 'refused'
    return _judge_finite()


def command(function, argv):
    """Like configs.command, for a run that a signal may stop."""
    stopped = []

    def main(arguments):
        code = function(arguments)
        if code == 128 + signal.SIGTERM:
            stopped.append(code)
            return 0
        return code

    word, lines = configs.command(main, argv)
    return 'stopped' if stopped else word, lines


def _stops_after(calls):
    """A replacement for Interrupts.anywhere that stops a long run after some steps."""
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
