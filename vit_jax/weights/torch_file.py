"""PyTorch's files (.pth, .bin): dictionaries of tensors in a zip file, read without PyTorch.

Such a file contains a pickle, which can call any function. This module never runs a pickle. It
interprets the operations one by one; they can only make tensors and dictionaries, and any other
operation is an error.
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
    'DoubleStorage': np.dtype('float64'),
    'FloatStorage': np.dtype('float32'),
    'HalfStorage': np.dtype('float16'),
    'BFloat16Storage': np.dtype(ml_dtypes.bfloat16),
    'LongStorage': np.dtype('int64'),
    'IntStorage': np.dtype('int32'),
    'ShortStorage': np.dtype('int16'),
    'CharStorage': np.dtype('int8'),
    'ByteStorage': np.dtype('uint8'),
    'BoolStorage': np.dtype('bool'),
}

_Storage = collections.namedtuple('_Storage', 'kind record')
_Tensor = collections.namedtuple('_Tensor', 'storage offset shape strides')

# Names that a pickle may use, each with the function that this module calls in its place.
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


_NUM_ITEMS = {'TUPLE1': 1, 'TUPLE2': 2, 'TUPLE3': 3, 'APPEND': 1, 'SETITEM': 2}


def _build(code):  # noqa: C901, PLR0912 - one case for each opcode
    """The object that a pickle describes; no part of the pickle is run, compared or printed.

    Python's own reader hashes keys, which takes forever for deeply nested tuples.
    """
    stack = []
    outer = []  # for each open MARK, the stack below it
    memo = {}
    for opcode, value, _ in pickletools.genops(code):  # genops checks lengths
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
                items = stack
                stack = outer.pop()
                _add(stack, name, items)
            case 'TUPLE1' | 'TUPLE2' | 'TUPLE3' | 'APPEND' | 'SETITEM' as name:
                count = _NUM_ITEMS[name]
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
                arguments = stack.pop()
                function = stack.pop()
                stack.append(function(*arguments))
            case 'BUILD':
                stack.pop()  # the version numbers of a state dict
            case 'BINPERSID':
                stack.append(_Storage(*stack.pop()[1:3]))
            case name if name not in ('PROTO', 'FRAME'):
                raise UserError(
                    f'it is a pickle with {name}, which no file of tensors has; nothing was run',
                    kind='content',
                    value=name,
                )
    raise ValueError('no end')


def _add(stack, name, items):
    """Pushes a tuple of the items, or adds the items to the object at the top of the stack."""
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
            f'it uses {module}.{name}, which is not part of a tensor; nothing '
            'was run. If you trust the author of the file, load it with PyTorch and save its '
            'state_dict() alone',
            kind='content',
            value=f'{module}.{name}',
        )
    return _ALLOWED[module, name]


def read(file: zipfile.ZipFile) -> dict[str, np.ndarray]:
    """Arrays by name; from a whole training state, only the arrays of its model.

    Raises UserError, without the file's name, if the file has no tensors or anything besides
    tensors; other exceptions if the file is damaged.
    """
    pickle_name = next(name for name in file.namelist() if name.endswith('data.pkl'))
    root = pickle_name.removesuffix('data.pkl')
    limits.check_header(pickle_name, file.getinfo(pickle_name).file_size, limits.PICKLE)
    tensors = _tensors(_build(file.read(pickle_name)))
    assert file.filename is not None  # it was opened by its path
    limits.check_arrays(
        file.filename,
        ((name, x.shape, STORAGES[x.storage.kind].itemsize) for name, x in tensors.items()),
    )
    records = {x.storage: file.getinfo(f'{root}data/{x.storage.record}') for x in tensors.values()}
    limits.check_arrays(
        file.filename, ((info.filename, (info.file_size,), 1) for info in records.values())
    )
    is_big_endian = _is_big_endian(file, f'{root}byteorder')
    storages = {
        storage: _read_storage(file, info, STORAGES[storage.kind], is_big_endian)
        for storage, info in records.items()
    }
    return {name: _array(storages[x.storage], x) for name, x in tensors.items()}


def _is_big_endian(file, record):
    """Whether numbers are big-endian; older files lack the record and are little-endian."""
    return record in file.namelist() and file.open(record).read(4) == b'big'


def _read_storage(file, info, dtype, is_big_endian):
    numbers = np.frombuffer(file.read(info), f'u{dtype.itemsize}')
    if is_big_endian:
        numbers = numbers.byteswap()
    return numbers.view(dtype)


def _tensors(tree):
    """The tensors in the object of a pickle by name; UserError if there are none."""
    for key in ('state_dict', 'model_state_dict', 'model'):
        if isinstance(tree, dict) and isinstance(tree.get(key), dict):
            tree = tree[key]
    tensors = {}
    if isinstance(tree, dict):
        tensors = {str(name): _checked(x) for name, x in tree.items() if isinstance(x, _Tensor)}
    if not tensors:
        raise UserError('it has no dictionary of tensors: save model.state_dict()', kind='content')
    return tensors


def _checked(tensor):
    """The tensor; ValueError unless its description consists of a storage and numbers."""
    storage, offset, shape, strides = tensor
    shape = tuple(shape)
    strides = tuple(strides)
    if not isinstance(storage, _Storage):
        raise ValueError('a tensor has no storage')
    are_texts = all(isinstance(x, str) for x in storage)
    are_numbers = all(type(n) is int and n >= 0 for n in (offset, *shape, *strides))
    if not are_texts or not are_numbers or len(shape) != len(strides):
        raise ValueError('a tensor has an impossible storage, or impossible lengths and strides')
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
    """Writes torch.save(state_dict); raises UserError if PyTorch is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UserError(
            'PyTorch, which writes .pth, .pt and .bin files, cannot be imported '
            f'({error}): name a .safetensors file, or pip install torch.',
            kind='missing',
            file=path,
        ) from error
    with open(path, 'wb') as file:  # torch.save would write the name of a path into the file
        try:
            torch.save({name: _tensor(torch, x) for name, x in arrays.items()}, file)
        except RuntimeError as error:  # PyTorch replaces the error of the disk by its own
            raise OSError(str(error.__context__ or error)) from error


def _tensor(torch, x):
    x = np.require(x, requirements='CW')  # PyTorch has no read-only arrays
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
