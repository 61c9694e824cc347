"""NumPy's files: only arrays of numbers, each name once, each with the size in its header."""

import struct
import zipfile

import numpy as np
import pytest

from tests.support.containers import read_error, reason


def write(path, *members):
    """Writes an .npz of members (name, header, data), which need not be valid."""
    with zipfile.ZipFile(path, 'w') as file:
        for name, header, data in members:
            start = struct.pack('<6sBBH', b'\x93NUMPY', 1, 0, len(header)) + header
            file.writestr(name, start + data)


def header(dtype='<f4', shape='(2,)'):
    return f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}}}\n".encode()


@pytest.mark.parametrize(
    'x',
    [
        np.array([b'text']),
        np.array(['text']),
        np.zeros(2, 'V4'),
        np.zeros(2, 'c8'),
        np.zeros(2, 'M8[s]'),
        np.zeros(2, [('a', 'f4')]),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda x: str(x.dtype),
)
def test_other_dtypes_than_numbers_are_refused(x, tmp_path):
    np.savez(tmp_path / 'x.npz', fine=np.ones(2), bad=x)
    error = read_error(tmp_path / 'x.npz')
    assert (error.field, error.value) == ('bad', x.dtype.str)


@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_two_arrays_of_one_name_are_refused(tmp_path):
    for second in ('a.npy', 'a'):
        write(tmp_path / 'x.npz', ('a.npy', header(), bytes(8)), (second, header(), bytes(8)))
        expected = {
            'a': 'a is no array: expected names ending in .npy',
            'a.npy': 'it has two arrays of the name a',
        }[second]
        assert expected in reason(tmp_path / 'x.npz')


@pytest.mark.parametrize(
    ('given', 'data', 'expected'),
    [
        (header(), bytes(4), 'x has 4 bytes, its shape (2,) needs 8'),
        (header(), bytes(80), 'x has 80 bytes, its shape (2,) needs 8'),
        (header(shape='(2, 2000000)'), bytes(8), 'x has 8 bytes, its shape (2, 2000000) needs'),
        (header(shape='(1099511627776, 1099511627776)'), bytes(8), 'was refused: its'),
        (header(shape='(1099511627776, 0)'), b'', 'was refused: its'),
        (header(shape='(-1,)'), b'', 'damaged'),
        (b'-' * 9000 + b'1', b'', 'x has a header that NumPy does not write'),
        (b'(' * 9000, b'', 'damaged'),
    ],
    ids=lambda x: str(x)[:40],
)
def test_sizes_are_checked_before_memory_is_allocated(given, data, expected, tmp_path):
    write(tmp_path / 'x.npz', ('x.npy', given, data))
    assert expected in reason(tmp_path / 'x.npz')
