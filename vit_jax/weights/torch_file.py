"""PyTorch's files (.pth, .bin): dictionaries of tensors in a zip file, read without PyTorch.

Such a file holds a pickle, which can call any function there is. Here it can make tensors and
dictionaries; whatever else it names is refused before it is called.
"""

import collections
import io
import math
import pickle
import pickletools
import zipfile

import ml_dtypes
import numpy as np

from vit_jax.errors import UserError

STORAGES = {f'{name}Storage': np.dtype(dtype) for name, dtype in dict(
    Double='float64', Float='float32', Half='float16', BFloat16=ml_dtypes.bfloat16, Long='int64',
    Int='int32', Short='int16', Char='int8', Byte='uint8', Bool='bool').items()}

_Tensor = collections.namedtuple('_Tensor', 'storage offset shape strides')


# A pickle can set attributes of what it is given: neither of these classes lets it.
class _Rebuild:
    """A tensor from its storage and numbers; a parameter is its tensor."""

    __slots__ = ()

    def __call__(self, first, *numbers):
        return first if isinstance(first, _Tensor) else _Tensor(first, *numbers[:3])


class _Dict(dict):
    __slots__ = ()

    def __setstate__(self, _):
        """Ignores the version numbers of a state dict."""


_ALLOWED = {
    ('collections', 'OrderedDict'): _Dict,
    ('torch._utils', '_rebuild_tensor_v2'): _Rebuild(),
    ('torch._utils', '_rebuild_parameter'): _Rebuild(),
    **{('torch', name): name for name in STORAGES},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if (module, name) not in _ALLOWED:
            raise UserError(f'it asks for {module}.{name}, which is not part of a tensor; nothing '
                            'was run. Only take such a file from someone you trust; then load it '
                            'with PyTorch and save its state_dict() alone')
        return _ALLOWED[module, name]

    def persistent_load(self, pid):
        return pid[1:3]  # a key of STORAGES, and the name of the record with its bytes


def read(file: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Arrays by name; of a whole training state, those of its model.

    Raises UserError, without the file's name, if it asks for anything but tensors or holds none;
    other exceptions if it is damaged.
    """
    record = next(name for name in file.namelist() if name.endswith('data.pkl'))
    root, code = record.removesuffix('data.pkl'), file.read(record)
    for opcode, number, _ in pickletools.genops(code):  # which checks lengths, too
        if opcode.name.endswith('PUT') and number > len(code):
            raise ValueError(f'{opcode.name} {number} would fill the memory')
    tree = _Unpickler(io.BytesIO(code), encoding='utf-8').load()
    for key in ('state_dict', 'model_state_dict', 'model'):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    items = tree.items() if isinstance(tree, dict) else ()
    tensors = {str(name): x for name, x in items if isinstance(x, _Tensor)}
    if not tensors:
        raise UserError('it holds no dictionary of tensors: save model.state_dict()')
    order = f'{root}byteorder'  # of the machine that wrote it; older files are little-endian
    swap = order in file.namelist() and file.read(order) == b'big'
    return {name: _array(file, root, x, swap) for name, x in tensors.items()}


def _array(file, root, tensor, swap):
    kind, record = tensor.storage
    dtype = STORAGES[kind]
    storage = np.frombuffer(file.read(f'{root}data/{record}'), f'u{dtype.itemsize}')
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
    """Writes torch.save(state_dict); raises UserError where PyTorch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UserError('PyTorch writes .pth, .pt and .bin files and cannot be imported here '
                        f'({error}): name a .safetensors file, or pip install torch.') from error
    with open(path, 'wb') as file:  # without a name that torch.save would write into it
        torch.save({name: _tensor(torch, x) for name, x in arrays.items()}, file)


def _tensor(torch, x):
    x = np.require(x, requirements='CW')  # PyTorch has no read-only arrays
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
