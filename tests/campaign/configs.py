"""Config values of the wrong type, out of range, or beyond the resources of the machine.

Each case runs the command line of vit_jax.main up to the creation of the training state.
"""

import logging
import math
import os
import pathlib
from unittest import mock

from tests.campaign import mutate
from tests.campaign.cases import Failure
from tests.support.runs import ROOT, TINY
from vit_jax import config as config_lib

SECONDS = 20
GIGABYTES = 2
QUOTA = 1500
RECIPES = ('quickstart.py', 'quickstart.py:hybrid', 'quickstart.py:resnet', 'quickstart.py:axial')
NUMBERS = (
    'nan',
    'inf',
    '-inf',
    '-1',
    '0',
    '1',
    '2',
    '3',
    '1.5',
    '-0.5',
    '1e-9',
    '1e30',
    '1e400',
    '10' * 11,
    '1000000000',
    '100000',
    '99999999999999999999999',
    '0x10',
    '007',
    '1_000',
)
OTHERS = (
    '',
    ' ',
    'x',
    'None',
    'True',
    'false',
    '[]',
    '()',
    '{}',
    '(1,2)',
    '1,2',
    '1,2,3',
    '0,0,0',
    '-1,-1',
    'nan,0,0',
    'a,b,c',
    '1,2,3,4',
    '16,-16',
    'x' * 300,
    '\u00e9\u202e',
    '../..',
    '/dev/zero',
    '/dev/null',
    '/',
    'hf:x',
    'hf:x/y',
    '.',
    '*',
    '(?',
    '.=1',
    '.=nan',
    'x=',
    'train[:0%]',
    'train[5:2]',
    'train[',
    'b16',
    'cls',
    'digits',
    '"',
    "'",
    '$HOME',
    '%s',
)
MAY_BE_NEGATIVE = ('mesh.', 'seed', 'model.head_bias_init')
AT_MOST_1 = (
    'loss.label_smoothing',
    'augment.min_area',
    'preprocess.crop_ratio',
    'ema_decay',
    'dataset.balance',
    'dataset.max_broken_fraction',
    'preprocess.mean',
    'preprocess.std',
    'model.dropout_rate',
)
FILES = ('none', 'empty', 'text', 'binary', 'directory', 'fifo', 'raises', 'number')


def prepare(bases):
    """Does nothing: the recipes are in configs/."""


def draw(rng, bases):
    base = rng.choice((RECIPES[0], RECIPES[0], *RECIPES))
    if rng.random() < 0.03:
        return base, [('file', rng.choice(FILES))]
    fields = sorted(config_lib.flatten(config_lib.base()))
    changes = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = rng.choice(rng.choice((NUMBERS, NUMBERS, OTHERS)))
        changes.append(('set', rng.choice(fields), value))
    if rng.random() < 0.03:
        changes.append(
            (
                'argument',
                rng.choice(
                    (
                        '--x',
                        'x',
                        '--config.x=1',
                        '--config.seed',
                        '--',
                        '--workdir',
                        '--config.model.x=1',
                        '-h=1',
                    )
                ),
            )
        )
    return base, changes


def make(case, bases):
    for operation, name, *_ in case.changes:
        if operation == 'file' and name in ('raises', 'number'):
            text = {'raises': '1 / 0', 'number': 'def get_config():\n    return 7'}[name]
            pathlib.Path('config.py').write_text(text + '\n')
        elif operation == 'file':
            pathlib.Path('config.py').touch()
            name = {'none': 'missing'}.get(name, name)
            mutate.in_place('config.py', name)


class Reached(BaseException):
    """The command accepts the config and would create the training state next."""


def check(case, bases):
    from vit_jax import main
    from vit_jax.training import loop

    argv = [
        f'--config={ROOT}/configs/{case.base}',
        '--workdir=runs',
        '--num_processes=1',
        *(
            f'--config.{field}={value}'
            for field, value in TINY.items()
            if not field.startswith('model.') or case.base == RECIPES[0]
        ),
    ]
    for operation, name, *value in case.changes:
        if operation == 'file':
            argv[0] = '--config=config.py'
            argv[3:] = []
        else:
            argv.append(name if operation == 'argument' else f'--config.{name}={value[0]}')

    resolve = loop.run_lib.resolve

    def reached(*arguments):
        raise Reached(resolve(*arguments)[0].config)

    try:
        with mock.patch.object(loop.run_lib, 'resolve', reached):
            return command(main.main, argv)[0]
    except Reached as end:
        return accepted(end.args[0], case)


def command(function, argv):
    """Calls a command; returns ('done' or 'refused', log lines), or raises Failure."""
    lines = Lines()
    logger = logging.getLogger('vit_jax')
    with mock.patch.object(logger, 'handlers', [lines]):
        try:
            code = function(argv)
        except SystemExit as end:
            code = end.code
    if code not in (0, 2):  # 2: argparse has printed the error
        lines.require_message()
    return 'refused' if code else 'done', [record.getMessage() for record in lines.records]


class Lines(logging.Handler):
    """The log lines of a command."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def require_message(self):
        """Raises Failure unless exactly one error was logged; raises the error of a traceback."""
        errors = [r for r in self.records if r.levelno >= logging.ERROR]
        for record in errors:
            if record.exc_info:
                raise record.exc_info[1]
        if len(errors) != 1:
            raise Failure('no message', f'{len(errors)} errors logged')
        if len(errors[0].getMessage()) > 4000:
            raise Failure('no message', errors[0].getMessage()[:200])


def accepted(config, case):
    """Returns 'accepted', or raises Failure for impossible values."""
    values = config_lib.flatten(config)
    for operation, name, *_ in case.changes:
        value = values.get(name) if operation == 'set' else None
        numbers = value if isinstance(value, list | tuple) else [value]
        for number in numbers:
            if isinstance(number, int | float) and not name.startswith(MAY_BE_NEGATIVE):
                if not math.isfinite(number):
                    raise Failure('accepted', f'{name} not finite')
                if number < 0:
                    raise Failure('accepted', f'{name} negative')
                if number > 1 and name in AT_MOST_1:
                    raise Failure('accepted', f'{name} above one')
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    if 12 * config.batch_size * math.prod(config.image_size) > memory:
        raise Failure('accepted', 'a batch larger than the memory')
    return 'accepted'
