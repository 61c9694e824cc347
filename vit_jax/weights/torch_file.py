"""PyTorch's files (.pth, .bin) without PyTorch: dictionaries of tensors in a zip file.

Such a file holds a pickle, which can call any function there is. Here it can make tensors and
dictionaries; whatever else it names is refused before it is called.
"""

import io
import math
import pickle
import pickletools
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from vit_jax.errors import UserError

STORAGES = {
    'DoubleStorage': np.dtype('float64'), 'FloatStorage': np.dtype('float32'),
    'HalfStorage': np.dtype('float16'), 'BFloat16Storage': np.dtype(ml_dtypes.bfloat16),
    'LongStorage': np.dtype('int64'), 'IntStorage': np.dtype('int32'),
    'ShortStorage': np.dtype('int16'), 'CharStorage': np.dtype('int8'),
    'ByteStorage': np.dtype('uint8'), 'BoolStorage': np.dtype('bool'),
}
_NAMES = {dtype: name for name, dtype in STORAGES.items()}


# What the pickle gets in its hands can be neither changed nor made to do anything.


class _StorageType(NamedTuple):
    name: str


class _Storage(NamedTuple):
    type: Any
    key: Any


class _Tensor(NamedTuple):
    storage: Any
    offset: Any
    shape: Any
    strides: Any


class _RebuildTensor:
    __slots__ = ()

    def __call__(self, storage, offset, shape, strides, *_):
        return _Tensor(storage, offset, shape, strides)


class _RebuildParameter:
    __slots__ = ()

    def __call__(self, tensor, *_):
        return tensor


class _Dict(dict):
    __slots__ = ()

    def __setstate__(self, _):
        """A state dict's version numbers: not needed."""


_ALLOWED = {
    ('collections', 'OrderedDict'): _Dict,
    ('torch._utils', '_rebuild_tensor_v2'): _RebuildTensor(),
    ('torch._utils', '_rebuild_parameter'): _RebuildParameter(),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if module == 'torch' and name in STORAGES:
            return _StorageType(name)
        if (module, name) not in _ALLOWED:
            raise UserError(f'it asks for {module}.{name}, which is no part of a tensor; nothing '
                            'was run. Only take such a file from someone you trust; then load it '
                            'with PyTorch and save its state_dict() alone')
        return _ALLOWED[module, name]

    def persistent_load(self, pid):
        _, kind, key, *_ = pid
        return _Storage(kind, key)


def read(file: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Arrays by name; of a whole training state, those of its model.

    Raises:
      UserError, without the file's name: it asks for anything but tensors, or holds none.
      Other exceptions: it is damaged.
    """
    record = next(name for name in file.namelist() if name.endswith('data.pkl'))
    root, code = record.removesuffix('data.pkl'), file.read(record)
    for opcode, number, _ in pickletools.genops(code):  # checks lengths on its way
        if opcode.name.endswith('PUT') and number > len(code):
            raise ValueError(f'{opcode.name} {number} would fill the memory')
    tree = _Unpickler(io.BytesIO(code), encoding='utf-8').load()
    for key in ('state_dict', 'model_state_dict', 'model'):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    tensors = {name: x for name, x in tree.items() if isinstance(x, _Tensor)} if (
        isinstance(tree, dict)) else {}
    if not tensors:
        raise UserError('it holds no dictionary of tensors: save model.state_dict()')
    order = f'{root}byteorder'  # of the machine that wrote it; older files are little-endian
    swap = order in file.namelist() and file.read(order) == b'big'
    return {str(name): _array(file, root, x, swap) for name, x in tensors.items()}


def _array(file, root, tensor, swap):
    dtype = STORAGES[tensor.storage.type.name]
    storage = np.frombuffer(file.read(f'{root}data/{tensor.storage.key}'), f'u{dtype.itemsize}')
    storage = (storage.byteswap() if swap else storage).view(dtype)
    shape, strides = tuple(tensor.shape), tuple(tensor.strides)
    numbers = (tensor.offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f'shape {shape} and strides {strides}')
    last = tensor.offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= len(storage):
        raise ValueError(f'a tensor ends at {last}, its storage at {len(storage)}')
    return np.lib.stride_tricks.as_strided(
        storage[tensor.offset:], shape, [s * dtype.itemsize for s in strides], writeable=False)


def write(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes what torch.save(state_dict, path) writes."""
    out = [b'\x80\x02}(']  # protocol 2, a dict, the mark before its items
    for k, (name, x) in enumerate(arrays.items()):
        strides = tuple(math.prod(x.shape[d + 1:]) for d in range(x.ndim))
        out += [_pickled(name), b'ctorch._utils\n_rebuild_tensor_v2\n((', _pickled('storage'),
                f'ctorch\n{_NAMES[x.dtype]}\n'.encode(), _pickled(str(k)), _pickled('cpu'),
                _pickled(x.size), b'tQ', _pickled(0), _pickled(x.shape), _pickled(strides),
                b'\x89ccollections\nOrderedDict\n)RtR']  # False, OrderedDict(), the call
    out.append(b'u.')
    records = {'data.pkl': b''.join(out), 'byteorder': b'little',
               **{f'data/{k}': x for k, x in enumerate(arrays.values())}, 'version': b'3\n'}
    with zipfile.ZipFile(path, 'w') as file:
        for name, data in records.items():  # ZipInfo by itself has a date, always the same
            with file.open(zipfile.ZipInfo(f'archive/{name}'), 'w', force_zip64=True) as record:
                record.write(data if isinstance(data, bytes) else data.tobytes())


def _pickled(value):
    """The opcodes that make a value, without protocol and stop."""
    return pickle.dumps(value, protocol=2)[2:-1]
