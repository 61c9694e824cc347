"""Arrays of every dtype, and damaged or malicious files."""

import os
import pickle
import zipfile

import ml_dtypes
import numpy as np

from tests.support.errors import refused
from vit_jax.weights import array_files

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.int32, bool)


def arrays():
    rng = np.random.default_rng(0)
    random = {f'a.{np.dtype(t).name}/x': rng.normal(size=(3, 2, 5)).astype(t) for t in DTYPES}
    return random | {
        'transposed': rng.normal(size=(4, 3)).T,
        'scalar': np.float32(3.5).reshape(()),
        'empty': np.zeros((0, 3), np.float32),
    }


def assert_same(arrays, expected):
    assert arrays.keys() == expected.keys()
    for name, x in expected.items():
        assert arrays[name].dtype == x.dtype, name
        assert arrays[name].shape == x.shape, name
        assert arrays[name].tobytes() == x.tobytes(), name


def read_error(path, kind='content'):
    """The error, of a kind and about the file, that reading it raises."""
    with refused(kind, file=path) as error:
        array_files.read(str(path))
    return error.value


def reason(path):
    """The message of the error about the content of a file."""
    return str(read_error(path))


def write_pickle(path, value):
    with zipfile.ZipFile(path, 'w') as file:
        file.writestr(
            'archive/data.pkl',
            value if isinstance(value, bytes) else pickle.dumps(value, protocol=2),
        )


def tensor(shape, strides=(1,), key=b'X\x01\x00\x00\x00w'):
    """A pickle of {'w': a tensor of record 0}; `shape` and `key` may be bytes of a pickle."""

    def code(value):
        return value if isinstance(value, bytes) else pickle.dumps(value, protocol=2)[2:-1]

    storage = b'(Nctorch\nFloatStorage\nX\x01\x00\x00\x000NNtQ'
    return (
        b'\x80\x02}'
        + key
        + b'ctorch._utils\n_rebuild_tensor_v2\n('
        + storage
        + b'K\x00'
        + code(shape)
        + code(strides)
        + b'\x89tRs.'
    )


class Touch:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.open, (self.path, os.O_CREAT)
