"""PyTorch's files (.pth, .bin): dictionaries of tensors in a zip file, read without PyTorch.

Such a file holds a pickle, which can call any function there is. Here it is not run: its
operations are followed one by one, they make tensors and dictionaries, and a file with others is
refused.
"""

import collections
import math
import pickletools
import zipfile

import ml_dtypes
import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights import limits

STORAGES = {
    f'{name}Storage': np.dtype(dtype)
    for name, dtype in dict(
        Double='float64',
        Float='float32',
        Half='float16',
        BFloat16=ml_dtypes.bfloat16,
        Long='int64',
        Int='int32',
        Short='int16',
        Char='int8',
        Byte='uint8',
        Bool='bool',
    ).items()
}

_Storage = collections.namedtuple('_Storage', 'kind record')
_Tensor = collections.namedtuple('_Tensor', 'storage offset shape strides')

# What a pickle may name, as functions of the arguments that it gives them.
_ALLOWED = {
    ('collections', 'OrderedDict'): lambda *_: {},
    ('torch._utils', '_rebuild_tensor_v2'): lambda *arguments: _Tensor(*arguments[:4]),
    ('torch._utils', '_rebuild_parameter'): lambda tensor, *_: tensor,
    **{('torch', name): name for name in STORAGES},
}
_KEYS = (str, int, float, bytes, type(None))
_CONSTANTS = {
    'NONE': lambda: None,
    'NEWTRUE': lambda: True,
    'NEWFALSE': lambda: False,
    'EMPTY_TUPLE': tuple,
    'EMPTY_LIST': list,
    'EMPTY_DICT': dict,
}
_VALUES = (
    'BININT',
    'BININT1',
    'BININT2',
    'LONG1',
    'LONG4',
    'INT',
    'LONG',
    'BINFLOAT',
    'FLOAT',
    'BINUNICODE',
    'SHORT_BINUNICODE',
    'BINUNICODE8',
    'UNICODE',
    'SHORT_BINSTRING',
    'BINSTRING',
    'BINBYTES',
    'SHORT_BINBYTES',
)


def _build(code):  # noqa: C901, PLR0912 - one case for each opcode
    """The object that a pickle describes; nothing of it is run, compared or printed.

    Python's own reader takes for ever for keys that are tuples of tuples, by computing their hash.
    """
    stack, outer, memo = [], [], {}
    for opcode, value, _ in pickletools.genops(code):  # which checks lengths
        match opcode.name:
            case 'STOP':
                return stack.pop()
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            case name if name in _VALUES:
                stack.append(value)
            case 'MARK':
                outer.append(stack)
                stack = []
            case 'TUPLE' | 'APPENDS' | 'SETITEMS' as name:
                items, stack = stack, outer.pop()
                _add(stack, name, items)
            case 'TUPLE1' | 'TUPLE2' | 'TUPLE3' | 'APPEND' | 'SETITEM' as name:
                count = {'APPEND': 1, 'SETITEM': 2}.get(name) or int(name[-1])
                _add(stack, name, [stack.pop() for _ in range(count)][::-1])
            case 'PUT' | 'BINPUT' | 'LONG_BINPUT' | 'MEMOIZE':
                memo[len(memo) if value is None else value] = stack[-1]
            case 'GET' | 'BINGET' | 'LONG_BINGET':
                stack.append(memo[value])
            case 'GLOBAL':
                stack.append(_find(*value.split(' ', 1)))
            case 'STACK_GLOBAL':
                name = stack.pop()
                stack.append(_find(stack.pop(), name))
            case 'REDUCE':
                arguments, function = stack.pop(), stack.pop()
                stack.append(function(*arguments))
            case 'BUILD':
                stack.pop()  # the version numbers of a state dict
            case 'BINPERSID':
                stack.append(_Storage(*stack.pop()[1:3]))
            case name if name not in ('PROTO', 'FRAME'):
                raise UserError(
                    f'it is a pickle with {name}, which no file of tensors has; nothing was run'
                )
    raise ValueError('no end')


def _add(stack, name, items):
    """Adds to the stack a tuple of the items, or the items to what is the last on the stack."""
    if name.startswith('TUPLE'):
        stack.append(tuple(items))
    elif name.startswith('APPEND'):
        stack[-1].extend(items)
    else:
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, _KEYS) or key in stack[-1]:
                raise ValueError(f'a {type(key).__name__} is no new key of a dictionary')
            stack[-1][key] = value


def _find(module, name):
    if not (isinstance(module, str) and isinstance(name, str)):
        raise ValueError('a name is no text')
    if (module, name) not in _ALLOWED:
        raise UserError(
            f'it asks for {module}.{name}, which is not part of a tensor; nothing '
            'was run. Only take such a file from someone you trust; then load it '
            'with PyTorch and save its state_dict() alone'
        )
    return _ALLOWED[module, name]


def read(file: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Arrays by name; of a whole training state, those of its model.

    Raises UserError, without the file's name, if it asks for anything but tensors or holds none;
    other exceptions if it is damaged.
    """
    record = next(name for name in file.namelist() if name.endswith('data.pkl'))
    limits.check_header(record, file.getinfo(record).file_size, limits.PICKLE)
    tree, root = _build(file.read(record)), record.removesuffix('data.pkl')
    for key in ('state_dict', 'model_state_dict', 'model'):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    items = tree.items() if isinstance(tree, dict) else ()
    tensors = {str(name): _checked(x) for name, x in items if isinstance(x, _Tensor)}
    if not tensors:
        raise UserError('it holds no dictionary of tensors: save model.state_dict()')
    assert file.filename is not None  # it was opened by its path
    limits.check_arrays(
        file.filename,
        ((name, x.shape, STORAGES[x.storage.kind].itemsize) for name, x in tensors.items()),
    )
    records = {x.storage: file.getinfo(f'{root}data/{x.storage.record}') for x in tensors.values()}
    limits.check_arrays(
        file.filename, ((info.filename, (info.file_size,), 1) for info in records.values())
    )
    order = f'{root}byteorder'  # of the machine that wrote it; older files are little-endian
    swap = order in file.namelist() and file.open(order).read(4) == b'big'
    storages = {}
    for storage, info in records.items():
        dtype = STORAGES[storage.kind]
        bits = np.frombuffer(file.read(info), f'u{dtype.itemsize}')
        storages[storage] = (bits.byteswap() if swap else bits).view(dtype)
    return {name: _array(storages[x.storage], x) for name, x in tensors.items()}


def _checked(tensor):
    """The tensor; ValueError if it is described by anything but a storage and numbers."""
    storage, offset, shape, strides = tensor
    shape, strides = tuple(shape), tuple(strides)
    numbers = all(type(n) is int and n >= 0 for n in (offset, *shape, *strides))
    if (
        not isinstance(storage, _Storage)
        or not all(isinstance(x, str) for x in storage)
        or (len(shape) != len(strides) or not numbers)
    ):
        raise ValueError('a tensor has no storage, or impossible lengths and strides')
    return tensor._replace(shape=shape, strides=strides)


def _array(storage, tensor):
    _, offset, shape, strides = tensor
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= len(storage):
        raise ValueError(f'a tensor ends at {last}, its storage at {len(storage)}')
    return np.lib.stride_tricks.as_strided(
        storage[offset:], shape, [s * storage.itemsize for s in strides], writeable=False
    )


def write(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes torch.save(state_dict); raises UserError where PyTorch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UserError(
            'PyTorch writes .pth, .pt and .bin files and cannot be imported here '
            f'({error}): name a .safetensors file, or pip install torch.'
        ) from error
    with open(path, 'wb') as file:  # without a name that torch.save would write into it
        try:
            torch.save({name: _tensor(torch, x) for name, x in arrays.items()}, file)
        except RuntimeError as error:  # PyTorch's own, in place of the disk's
            raise OSError(str(error.__context__ or error)) from error


def _tensor(torch, x):
    x = np.require(x, requirements='CW')  # PyTorch has no read-only arrays
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
