"""Output streams that cannot be written, and names with control characters or formulas.

Standard output and standard error are a file with any encoding, a full disk, a pipe without a
reader, or closed. A command does its work and escapes the characters of names that the stream
cannot encode or that a terminal or spreadsheet would obey. If it cannot write its result, it ends
with one message and exit code 1.
"""

import csv
import os
import pathlib
import shutil
import sys
import unicodedata

import numpy as np
from PIL import Image

from tests.campaign import cases, commands, runs
from tests.campaign.cases import Failure
from tests.support.datasets import write_images
from tests.support.forked import Forked

SECONDS = 300
GIGABYTES = 4
QUOTA = 60
PATIENCE = 120
OUT = 'stdout'
# One class for each kind of name.
CLASSES = (
    'plain',
    'Jos\u00e9 \u4e16\u754c \U0001f41c',
    '=1+1',
    '@x',
    '\x1b[31mred\x1b[0m',
    'right\u202eleft',
    'a\tb',
    'line\nbreak',
)
# Names of photos as bytes, because not all are UTF-8.
PHOTOS = (
    b'plain.png',
    'Jos\u00e9 \u4e16\u754c \U0001f41c.png'.encode(),
    b'=1+1.png',
    b'-dash.png',
    b'\x1b]0;title\x07\x1b[2J.png',
    'right\u202eleft.png'.encode(),
    b'a\tb,"c".png',
    b'line\nbreak.png',
    b'not \xff\xfe utf-8.png',
    b'\xc2\x9b31m.png',  # a control character beyond ASCII
)
COMMANDS = ('predict', 'predict json', 'predict csv', 'evaluate', 'evaluate json', 'train')
PRINTING = ('predict', 'predict json', 'evaluate', 'evaluate json')
ENCODINGS = ('utf-8', 'ascii', 'latin-1', 'cp1252')
STREAMS = ('file', 'file', 'file', 'full', 'unread', 'closed')
UNWRITABLE = ('full', 'unread')
FIELDS = runs.FIELDS | {
    'dataset.name': 'data',
    'dataset.eval_split': 'test',
    'batch_size': 8,
    'num_steps': 2,
    'optimizer.warmup_steps': 1,
    'keep_best': False,
}


def prepare(bases):
    write_images(bases / 'data/train', CLASSES, 3, seed=1)
    write_images(bases / 'data/test', CLASSES, 1, seed=2)
    os.mkdir(bases / 'photos')
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    for name in PHOTOS:
        with open(os.path.join(os.fsencode(bases / 'photos'), name), 'wb') as file:
            Image.fromarray(pixels).save(file, 'PNG')
    here = os.getcwd()
    os.chdir(bases)
    if Forked(commands.training('run', FIELDS), 'log', optimized=False).wait():
        raise RuntimeError(f'the run cannot be made: {pathlib.Path("log").read_text()}')
    os.chdir(here)


def draw(rng, bases):
    command = rng.choice(COMMANDS)
    stream = ('stdout', rng.choice(STREAMS), rng.choice(ENCODINGS))
    error = ('stderr', rng.choice(STREAMS) if rng.random() < 0.3 else 'file')
    start = ('typed', 'C') if rng.random() < 0.2 else ('fork',)
    return command, [stream, error, start]


def make(case, bases):
    shutil.copytree(bases / 'run', 'runs')
    shutil.copytree(bases / 'data', 'data')
    shutil.copytree(os.fsencode(bases / 'photos'), b'photos')


def redirect(stream, encoding, error):
    """Redirects the output of this process to OUT, /dev/full or a pipe without a reader."""
    sys.stdout.reconfigure(encoding=encoding, errors='strict')
    _redirect(1, stream, OUT)
    _redirect(2, error, None)
    if stream == 'closed':
        sys.stdout = None
    if error == 'closed':
        sys.stderr = None


def _redirect(number, stream, path):
    if stream == 'closed':
        os.close(number)
        return
    if stream == 'full':
        target = os.open('/dev/full', os.O_WRONLY)
    elif stream == 'unread':
        reader, target = os.pipe()
        os.close(reader)
    elif path:
        target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    else:
        return  # the log of the process
    os.dup2(target, number)
    os.close(target)


def check(case, bases):
    (_, stream, encoding), (_, error), (kind, *_) = case.changes
    first = (
        f'from tests.campaign import outputs; outputs.redirect({stream!r}, {encoding!r}, {error!r})'
    )
    module = case.base.partition(' ')[0]
    if module == 'train':
        module = 'main'
    if kind == 'typed':
        first += (
            f'\ncommands.as_typed({module!r}, PYTHONIOENCODING={encoding!r}, LC_ALL="C", '
            'PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")'
        )
    process = commands.start(_arguments(case.base), module, first)
    try:
        code = commands.end(process, commands.patience(PATIENCE))
        if code is None:
            raise Failure('hang', commands.stop(process))
    finally:
        process.kill()
        process.wait()
    return _judged(case, code)


def _arguments(command):
    if command == 'train':
        return commands.training('again', FIELDS)
    if command.startswith('evaluate'):
        options = ['--json'] if command.endswith('json') else []
        return ['--workdir=runs', '--split=test', *options]
    options = {'json': ['--json'], 'csv': ['--csv=out.csv']}.get(command.partition(' ')[2], [])
    # The folder in front of the names keeps '-dash.png' from looking like an option.
    names = [os.fsdecode(b'photos/' + name) for name in PHOTOS]
    return ['--workdir=runs', *options, *names]


def _judged(case, code):
    (_, stream, encoding), (_, error), (start, *_) = case.changes
    command = case.base
    written = commands.log()
    cases.require_no_noise(written)
    _require_harmless(written, 'stderr')
    out = pathlib.Path(OUT).read_bytes() if stream == 'file' else b''
    if code == 1 and stream in UNWRITABLE and command in PRINTING:
        if error == 'file':
            commands.require_one_message(written)
        return 'refused'
    if code == 1 and start == 'typed':  # the locale C cannot represent the names
        if error == 'file':
            commands.require_one_message(written)
            if 'PYTHONUTF8=1' not in written:
                raise Failure('abort', f'exit code 1: {written[-300:]}')
        return 'refused'
    if code:
        raise Failure('abort', f'exit code {code}: {written[-300:]}')
    if stream in UNWRITABLE and command in PRINTING:
        raise Failure('silent', f'{command} could not write to {stream} and ended with 0')
    if stream == 'file' and command in PRINTING:
        _judge_printed(command, out.decode(encoding))  # fails if the command used another encoding
    if command == 'predict csv':
        _judge_csv()
    return 'done'


def _judge_printed(command, text):
    if command.endswith('json'):
        value = commands.read_finite_json(text.splitlines()[-1])
        if command.startswith('predict'):
            # In the locale C all bytes beyond ASCII are escaped, and none is lost.
            names = [os.fsencode(image['image']) for image in value]
            if names != [b'photos/' + name for name in PHOTOS]:
                raise Failure('silent', f'names in JSON: {names}')
    elif 'plain' not in text:
        raise Failure('silent', f'the result is missing: {text[-200:]}')
    _require_harmless(text, 'stdout')


def _require_harmless(text, where):
    """Raises Failure for control characters, such as ESC, that a terminal obeys."""
    obeyed = [x for x in text if unicodedata.category(x) == 'Cc' and x not in '\n\t\r']
    if obeyed:
        raise Failure('obeyed', f'{where} has {obeyed[0]!r}')


def _judge_csv():
    with open('out.csv', newline='', encoding='utf-8', errors='surrogateescape') as file:
        rows = list(csv.reader(file))
    if len(rows) != 1 + len(PHOTOS):
        raise Failure('silent', f'{len(rows) - 1} rows for {len(PHOTOS)} photos')
    for row in rows[1:]:
        for cell in row:
            if cell.startswith(('=', '+', '-', '@', '\t', '\r')):
                raise Failure('obeyed', f'a cell of the CSV file begins with {cell[:1]!r}')
