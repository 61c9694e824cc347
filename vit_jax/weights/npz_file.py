"""NumPy's .npz: a zip file of arrays, whose sizes are checked before they are read."""

import io
import math
import zipfile
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from vit_jax.errors import UserError
from vit_jax.weights import limits

_BFLOAT16 = np.dtype('V2')  # NumPy has no bfloat16 and reads it as two bytes without a type
_DTYPES = (
    'float64',
    'float32',
    'float16',
    'int64',
    'int32',
    'int16',
    'int8',
    'uint64',
    'uint32',
    'uint16',
    'uint8',
    'bool',
)
_START = 1 << 14  # bytes; NumPy allows headers of 10,000


class _Member(NamedTuple):
    """An array in the zip file; its data start `start` bytes after the start of the member."""

    info: zipfile.ZipInfo
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int


def read(file: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Arrays by name. Raises UserError, without the file's name, if the file has anything else."""
    members = _members(file)
    assert file.filename is not None  # it was opened by its path
    limits.check_arrays(
        file.filename,
        ((name, member.shape, member.dtype.itemsize) for name, member in members.items()),
    )
    return {name: _read_array(file, name, member) for name, member in members.items()}


def _members(file):
    members = {}
    for info in file.infolist():
        name = info.filename.removesuffix('.npy')
        if name == info.filename:
            raise UserError(
                f'{name} is no array: expected names ending in .npy, and nothing else',
                kind='content',
                value=name,
            )
        if name in members:
            raise UserError(
                f'it has two arrays of the name {name}, and one would hide the other',
                kind='content',
                value=name,
            )
        members[name] = _read_header(file, info, name)
    return members


def _read_header(file, info, name):
    with file.open(info) as stream:
        start = io.BytesIO(stream.read(_START))
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, _, dtype = read_header[npy.read_magic(start)](start)
    except (KeyError, MemoryError, RecursionError):  # Python's parser raises them for deep nesting
        raise ValueError(f'{name} has a header that NumPy does not write') from None
    if dtype.hasobject:
        raise UserError(
            f'{name} has pickled Python objects, which could run any command. If you '
            'trust it, load it with NumPy and save the arrays alone',
            kind='content',
            field=name,
        )
    if dtype != _BFLOAT16 and dtype.name not in _DTYPES:
        raise UserError(
            f'{name} has dtype {dtype.str}, which is not supported: expected one of '
            f'{", ".join(_DTYPES)}. Convert it with the program that wrote it',
            kind='content',
            field=name,
            value=dtype.str,
        )
    return _Member(info, shape, dtype, start.tell())


def _read_array(file, name, member):
    size = member.info.file_size - member.start
    expected = math.prod(member.shape) * member.dtype.itemsize
    if size != expected:
        raise ValueError(f'{name} has {size} bytes, its shape {member.shape} needs {expected}')
    with file.open(member.info) as stream:
        x = npy.read_array(stream, allow_pickle=False)
    if member.dtype == _BFLOAT16:
        x = x.view(ml_dtypes.bfloat16)
    return x.astype(x.dtype.newbyteorder('='), copy=False)
