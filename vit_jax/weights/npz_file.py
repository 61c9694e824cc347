"""NumPy's .npz: a zip file of arrays, whose sizes are checked before they are read."""

import io
import math
import zipfile

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from vit_jax.errors import UserError
from vit_jax.weights import limits

_BFLOAT16 = np.dtype('V2')  # how NumPy, which does not know bfloat16, reads it
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


def read(file: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Arrays by name. Raises UserError, without the file's name, if it holds anything else."""
    members = {}
    for info in file.infolist():
        name = info.filename.removesuffix('.npy')
        if name == info.filename:
            raise UserError(f'{name} is no array: expected names ending in .npy, and nothing else')
        if name in members:
            raise UserError(f'it holds two arrays of the name {name}, and one would hide the other')
        members[name] = info, *_read_header(file, info, name)
    assert file.filename is not None  # it was opened by its path
    limits.check_arrays(
        file.filename,
        ((name, shape, dtype.itemsize) for name, (_, shape, dtype, _) in members.items()),
    )
    arrays = {}
    for name, (info, shape, dtype, start) in members.items():
        size = info.file_size - start
        if size != (expected := math.prod(shape) * dtype.itemsize):
            raise ValueError(f'{name} has {size} bytes, its shape {shape} needs {expected}')
        with file.open(info) as member:
            x = npy.read_array(member, allow_pickle=False)
        x = x.view(ml_dtypes.bfloat16) if dtype == _BFLOAT16 else x
        arrays[name] = x.astype(x.dtype.newbyteorder('='), copy=False)
    return arrays


def _read_header(file, info, name):
    """Shape, dtype and number of bytes before the data."""
    with file.open(info) as member:
        start = io.BytesIO(member.read(_START))
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, _, dtype = read_header[npy.read_magic(start)](start)
    except (KeyError, MemoryError, RecursionError):  # what Python's parser raises for nesting
        raise ValueError(f'{name} has a header that NumPy does not write') from None
    if dtype.hasobject:
        raise UserError(
            f'{name} holds pickled Python objects, which could run anything. If you '
            'trust it, load it with numpy and save the arrays alone'
        )
    if dtype != _BFLOAT16 and dtype.name not in _DTYPES:
        raise UserError(
            f'{name} has dtype {dtype.str}, which is not supported: expected one of '
            f'{", ".join(_DTYPES)}. Convert it with the program that wrote it'
        )
    return shape, dtype, start.tell()
