"""Changes bytes, JSON values and whole files; each change is a function of a seed."""

import json
import math
import os
import pathlib
import random
import shutil
import struct

DEEP = '@deep@'  # json_text replaces it by 200,000 brackets, which json.dumps cannot write
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    0.5,
    -0.5,
    1e-300,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    10**6,
    2**31,
    2**63,
    10**30,
    '',
    'x',
    '0',
    '16',
    '../x',
    '/dev/zero',
    'é\u0000\ud800',
    'x' * 10_000,
    [],
    [0],
    [1, 2],
    [-1, -1],
    [0.5] * 3,
    [0] * 3,
    [None],
    ['x'],
    [[]],
    {},
    {'0': 'x'},
    {'x': None},
    {'height': 0, 'width': -1},
    DEEP,
)


def _at(data, rng):
    return rng.randrange(len(data) + 1)


def _flip(data, rng):
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8, 64))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip_start(data, rng):
    return _flip(data[:256], rng) + data[256:]


def _flip_end(data, rng):
    return data[:-512] + _flip(data[-512:], rng)


def _truncate(data, rng):
    return data[: _at(data, rng)]


def _cut(data, rng):
    i = _at(data, rng)
    return data[:i] + data[i + rng.choice((1, 4, 100, 10_000)) :]


def _insert(data, rng):
    i = _at(data, rng)
    return data[:i] + rng.randbytes(rng.choice((1, 4, 100))) + data[i:]


def _zero(data, rng):
    i = _at(data, rng)
    n = rng.choice((1, 8, 512, 4096))
    return data[:i] + bytes(len(data[i : i + n])) + data[i + n :]


def _number(data, rng):
    """Overwrites a number by an extreme number, in half of the cases near the start."""
    kind = rng.choice(['<I', '>I', '<Q', '>Q', '<H', '>H'])
    number = rng.choice((0, 1, 0x7F, 0x7FFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63, 2**64 - 1))
    packed = struct.pack(kind, number % 256 ** struct.calcsize(kind))
    i = rng.randrange(min(len(data), rng.choice((64, len(data)))) or 1)
    return data[:i] + packed + data[i + len(packed) :]


def _copy(data, rng):
    i = _at(data, rng)
    j = _at(data, rng)
    part = data[i : i + rng.choice((4, 64, 1024))]
    return data[:j] + part + data[j + len(part) :]


def _append(data, rng):
    return data + rng.randbytes(rng.choice((1, 100, 5000)))


def _twice(data, rng):
    return data + data


BYTES = {
    f.__name__[1:]: f
    for f in (
        _flip,
        _flip_start,
        _flip_end,
        _truncate,
        _cut,
        _insert,
        _zero,
        _number,
        _copy,
        _append,
        _twice,
    )
}
WHOLE = {
    'empty': b'',
    'null': b'null',
    'list': b'[1, 2]',
    'number': b'7',
    'text': b'hello\n',
    'object': b'{}',
    'binary': bytes(range(256)) * 8,
    'zeros': bytes(4096),
    'brackets': b'[' * 200_000,
    'utf16': '{"a": 1}'.encode('utf-16'),
}


def _directory(path):
    path.mkdir()


def _fifo(path):
    os.mkfifo(path)


# Paths that even root, who ignores permissions, cannot read as files.
PLACES = {
    'missing': lambda path: None,
    'directory': _directory,
    'fifo': _fifo,
    'loop': lambda path: path.symlink_to(path.name),
    'device': lambda path: path.symlink_to('/dev/zero'),
    'dangling': lambda path: path.symlink_to('nowhere'),
}


def in_place(path, operation, seed=0):
    """Changes a file by an operation of BYTES, WHOLE or PLACES."""
    path = pathlib.Path(path)
    if operation in BYTES and not path.is_file():
        return  # an earlier change has replaced the file
    if operation in BYTES:
        data = BYTES[operation](path.read_bytes(), random.Random(seed))
    elif operation in WHOLE:
        data = WHOLE[operation]
    if operation in PLACES or not path.is_file():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if operation in PLACES:
        PLACES[operation](path)
    else:
        path.write_bytes(data)


def draw_in_place(rng, whole=0.2):
    """(operation, seed) for `in_place`; `whole` is the probability of WHOLE and PLACES."""
    names = [*WHOLE, *PLACES] if rng.random() < whole else [*BYTES]
    return rng.choice(names), rng.randrange(1 << 30)


def _places(value):
    """Yields (container, key) of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, x in list(items):
        yield value, key
        if isinstance(x, dict | list):
            yield from _places(x)


def change_json(value, operation, seed):
    """A JSON value with one change; `operation` is one of JSON."""
    rng = random.Random(seed)
    value = json.loads(json.dumps(value))
    places = []
    if isinstance(value, dict | list):
        places = list(_places(value))
    if operation == 'top' or not places:
        return rng.choice(VALUES)
    where, key = rng.choice(places)
    new = rng.choice(VALUES)
    if operation == 'delete':
        del where[key]
    elif operation == 'rename' and isinstance(where, dict):
        where[str(new)[:50]] = where.pop(key)
    elif operation == 'move':
        other, place = rng.choice(places)
        where[key] = other[place] if other is not where or place in _keys(where) else new
    elif operation == 'wrap':
        where[key] = rng.choice(([where[key]], {'x': where[key]}, str(where[key])))
    elif operation == 'scale' and isinstance(where[key], int | float):
        where[key] *= rng.choice((-1, 0, 2, 3, 0.5, 1000, 10**9))
    else:
        where[key] = new
    return value


def _keys(where):
    return where if isinstance(where, dict) else range(len(where))


JSON = ('value', 'value', 'value', 'delete', 'rename', 'move', 'wrap', 'scale', 'top')


def json_text(value):
    """The text of a JSON value, including NaN, DEEP and lone surrogates."""
    try:
        text = json.dumps(value)
    except ValueError:  # a value that contains itself
        text = 'null'
    return text.replace(f'"{DEEP}"', '[' * 200_000 + ']' * 200_000)
