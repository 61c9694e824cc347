"""Writes PyTorch's .pth files without PyTorch, changes them, and makes malicious ones."""

import io
import itertools
import pickletools
import struct
import zipfile

import numpy as np

from tests.campaign.cases import MARK
from vit_jax.weights import torch_file

ROOT = 'archive/'
_KINDS = {dtype: name for name, dtype in torch_file.STORAGES.items()}
_REBUILD = b'ctorch._utils\n_rebuild_tensor_v2\n'


def read(file):
    """Arrays of an open file."""
    return torch_file.read(file)


def write(path, arrays):
    with open(path, 'wb') as file:
        file.write(written(arrays))


def written(arrays, change=None, code=None):
    """The bytes of a .pth file.

    Args:
      arrays: the arrays by name.
      change: a function of the (shape, strides, offset, kind, numel) of each tensor.
      code: the bytes of data.pkl, by default the pickle of the tensors.
    """
    buffer = io.BytesIO()
    tensors = {}
    with zipfile.ZipFile(buffer, 'w') as file:
        for key, (name, x) in enumerate(sorted(arrays.items())):
            x = np.require(x, requirements='C').reshape(np.shape(x))
            strides = tuple(s // x.itemsize for s in x.strides)
            fields = (x.shape, strides, 0, _KINDS.get(x.dtype, 'FloatStorage'), x.size)
            if change:
                fields = change(fields)
            tensors[name] = (key, *fields)
            file.writestr(f'{ROOT}data/{key}', x.tobytes())
        file.writestr(f'{ROOT}data.pkl', code or _code(tensors))
        file.writestr(f'{ROOT}version', '3\n')
    return buffer.getvalue()


def _text(value):
    encoded = str(value).encode('utf-8', 'surrogatepass')
    return b'X' + struct.pack('<I', len(encoded)) + encoded


def _value(value):
    """The opcodes of a number, tuple or text, even if no tensor would have it."""
    if isinstance(value, tuple | list):
        return b'(' + b''.join(map(_value, value)) + b't'
    if isinstance(value, bool | int):
        return b'I%d\n' % value
    if isinstance(value, float):
        return b'F' + repr(value).encode() + b'\n'
    return b'N' if value is None else _text(value)


def _code(tensors):
    parts = [b'\x80\x02}(']
    for name, (key, shape, strides, offset, kind, numel) in tensors.items():
        storage = (
            b'('
            + _text('storage')
            + b'ctorch\n'
            + kind.encode()
            + b'\n'
            + _text(key)
            + _text('cpu')
            + _value(numel)
            + b'tQ'
        )
        parts += [
            _text(name),
            _REBUILD,
            b'(',
            storage,
            _value(offset),
            _value(shape),
            _value(strides),
            b'I00\n',
            b'ccollections\nOrderedDict\n)R',
            b'tR',
        ]
    return b''.join(parts) + b'u.'


def _rewritten(data, change):
    """The file with `change` applied to the bytes of data.pkl."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, 'w') as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith('data.pkl') else content)
    return buffer.getvalue()


def change_tensors(data, rng):
    """Changes the shape, strides, offset or storage of a tensor."""
    odd = (
        0,
        -1,
        1,
        2**33,
        2**63,
        10**30,
        0.5,
        None,
        'x',
        True,
        (),
        (1, 2),
        (2**33,),
        ((1,),),
        (0, 2**62),
        (1,) * 100,
    )
    chosen_call = rng.randrange(20)
    calls = itertools.count()

    def change(fields):
        if next(calls) != chosen_call:
            return fields
        position = rng.randrange(5)
        value = rng.choice(odd)
        if position == 3:
            value = rng.choice((*torch_file.STORAGES, 'UntypedStorage', 'load'))
        changed = list(fields)
        changed[position] = value
        return tuple(changed)

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            arrays = read(file)
    except Exception:  # an earlier change has damaged it already
        return data
    if rng.random() < 0.2:
        return written(arrays, _repeat_row)
    return written(arrays, change)


def _repeat_row(fields):
    """Turns a matrix into a view of 2**33 equal rows."""
    shape, _, *rest = fields
    if len(shape) != 2:
        return fields
    return (2**33, 64), (0, 1), *rest


def change_opcodes(data, rng):
    """Drops, doubles, exchanges or inserts opcodes."""

    def change(code):
        try:
            starts = [at for _, _, at in pickletools.genops(code)]
        except Exception:
            return code
        parts = [code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
        for _ in range(rng.choice((1, 2, 5))):
            i = rng.randrange(len(parts))
            j = rng.randrange(len(parts))
            operation = rng.choice(('drop', 'twice', 'swap', 'put'))
            if operation == 'swap':
                parts[i], parts[j] = parts[j], parts[i]
                continue
            odd = rng.choice(_ODD)  # drawn for every operation, so that seeds keep their cases
            if operation == 'drop':
                parts[i] = b''
            elif operation == 'twice':
                parts[i] = parts[i] * 2
            else:
                parts[i] = parts[i] + odd
        return b''.join(parts)

    return _rewritten(data, change)


_ODD = [
    bytes([op]) for op in b'(.0123)]}NQRabdehljostu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94'
] + [
    b'r\xff\xff\xff\x7f',
    b'p99999999999\n',
    b'h\xff',
    b'j\xff\xff\xff\x7f',
    b'I' + b'9' * 5000 + b'\n',
    b'L' + b'9' * 5000 + b'L\n',
    b'\x8b\xff\xff\xff\x7f',
    b'\x8e' + b'\xff' * 7 + b'\x7f',
    b'\x95' + b'\xff' * 8,
    b'\x8d' + b'\xff' * 8,
    b'\x96' + b'\xff' * 7 + b'\x7f',
    b'Pabc\n',
    b'\x82\x01',
    b'V\\ud800\n',
    b'Fnan\n',
    b'\x80\x09',
    b'\x97',
    b'\x98',
]

_COMMAND = b'touch ' + MARK.encode()
_RUN = [
    b"cos\nsystem\n(S'%s'\ntR" % _COMMAND,
    b"cposix\nsystem\n(S'%s'\ntR" % _COMMAND,
    b"(S'%s'\nios\nsystem\n" % _COMMAND,
    b"(cos\nsystem\nS'%s'\no" % _COMMAND,
    b'cbuiltins\nexec\n(S\'open("%s","w")\'\ntR' % MARK.encode(),
    b'cbuiltins\neval\n(S\'open("%s","w")\'\ntR' % MARK.encode(),
    b"\x8c\x02os\x8c\x06system\x93(S'%s'\ntR" % _COMMAND,
    b"csubprocess\nPopen\n((S'touch'\nS'%s'\nltR" % MARK.encode(),
    b"cbuiltins\nopen\n(S'%s'\nS'w'\ntR" % MARK.encode(),
    b"cnumpy\nsave\n(S'%s'\nI1\ntR" % MARK.encode(),
    b'\x8c\x0bcollections\x8c\x1eOrderedDict.__init__.__globals__\x93',
    b'ctorch._utils\n_rebuild_tensor_v2.__globals__\n',
    b"ctorch._utils\n_rebuild_tensor_v2\n}S'__class__'\ncos\nsystem\nsb",
    b"ccollections\nOrderedDict\n)R}S'update'\ncos\nsystem\nsb",
    b"cos\nsystem\nS'%s'\n\x85\x81" % _COMMAND,
    b"ctorch\nload\n(S'x'\ntR",
    b'ctorch._utils\n_rebuild_parameter\n(cos\nsystem\ntR',
    b"cos\nsystem\n(S'%s'\ntQ" % _COMMAND,
    b'ccodecs\nencode\n(VX\nVrot13\ntR',
    b'cfunctools\npartial\n(cos\nsystem\ntR',
]


def _nested(depth, end):
    """Tuples nested so that they have 2**depth elements, as a key, a shape or a tensor."""
    return b'}' + b'K\x01' + b'2\x86' * depth + end


_SLOW = [
    _nested(30, b'K\x01s'),
    _nested(60, b'K\x01s'),
    b'K\x01' + b'2\x86' * 30 + b'\x85\x81',
    b'(' * 500_000,
    b']' + b']a' * 200_000,
    b'(' * 100_000 + b't' * 100_000,
    b'](' + b'K\x01' * 1_000_000 + b'e',
    b']2a',
    b'}2K\x01\x86s',
    _REBUILD + b'(K\x01' + b'2\x86' * 30 + b'2222tR',
    _REBUILD
    + b"((S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nK\x01tQI0\nK\x01"
    + b'2\x86' * 30
    + b'2I00\nNtR',
    b'K\x01' + b'2\x86' * 30 + b'Q',
]


def malicious(data, rng):
    """A pickle that would run a command or never end, alone or together with the tensors."""
    payload = rng.choice(_RUN) if rng.random() < 0.7 else rng.choice(_SLOW)

    def change(code):
        start = b'\x80\x02'
        rest = code[2:]
        last_tensor = b''
        if rest[:-1]:
            last_tensor = start + rest[:-2] + _text('x') + payload + b'u.'
        return rng.choice(
            (
                start + payload + b'.',  # nothing else
                start + payload + b'0' + rest,  # before the tensors, then dropped
                start + b'}' + _text('x') + payload + b's.',  # the only tensor
                last_tensor,
            )
        )

    return _rewritten(data, change)


def object_array(rng):
    """An .npy file of Python objects."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, dict(descr='|O', fortran_order=False, shape=(1,)))
    return buffer.getvalue() + b'\x80\x02' + rng.choice(_RUN) + b'.'
