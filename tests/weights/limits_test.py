"""Limits on time and memory for small files, and other things than files."""

import os
import socket
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from tests.support.containers import read_error, reason, tensor, write_pickle
from tests.support.errors import refused
from vit_jax.weights import array_files, limits


@pytest.fixture(autouse=True)
def little_time_and_memory():
    start = time.process_time()
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - start < 10
    assert peak < 300e6


def test_other_things_than_files_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets must be short
    os.mkfifo('pipe.npz')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind('socket.npz')
        error = read_error('socket.npz', 'unreadable')
        assert str(error) == "'socket.npz' is a socket: expected a file."
    for path in ('pipe.npz', '/dev/zero', tmp_path):
        read_error(path, 'unreadable')
    index = tmp_path / 'model.safetensors.index.json'
    os.mkfifo(index)
    with refused('unreadable', file=index):
        array_files.read_path(str(tmp_path))


def test_other_things_than_files_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / 'x.npz')
    with refused('unwritable', file=tmp_path / 'x.npz'):
        array_files.check_replaceable(str(tmp_path / 'x.npz'))


def test_a_large_header_of_safetensors_is_refused(tmp_path):
    header = b'{"__metadata__": {"x": "' + b'y' * limits.HEADER + b'"}}'
    (tmp_path / 'x').write_bytes(len(header).to_bytes(8, 'little') + header)
    assert 'its header has 4,194,331 bytes: expected at most 4,194,304' in reason(tmp_path / 'x')


def test_a_large_pickle_is_refused(tmp_path):
    write_pickle(tmp_path / 'x.pth', b'\x80\x02' + b'}' * limits.PICKLE + b'.')
    assert 'its archive/data.pkl has 1,048,579 bytes: expected at most' in reason(
        tmp_path / 'x.pth'
    )


def test_compressed_zeros_are_refused_even_under_an_unused_name(tmp_path):
    with zipfile.ZipFile(tmp_path / 'x.npz', 'w', zipfile.ZIP_DEFLATED) as file:
        with file.open('needed.npy', 'w') as member:
            np.lib.format.write_array(member, np.ones(2))
        with file.open('bomb.npy', 'w', force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(
                member, {'descr': '<f4', 'fortran_order': False, 'shape': (10, 10_000_000)}
            )
            for _ in range(40):
                member.write(bytes(10_000_000))
    message = reason(tmp_path / 'x.npz')
    assert 'become 400,000,016 in memory, most of them in bomb (10, 10000000)' in message
    assert 'expected at most 20 times the size of the file' in message


def test_a_compressed_record_of_pytorch_is_refused(tmp_path):
    write_pickle(tmp_path / 'x.pth', tensor((2,), (1,)))
    with (
        zipfile.ZipFile(tmp_path / 'x.pth', 'a', zipfile.ZIP_DEFLATED) as file,
        file.open('archive/data/0', 'w') as member,
    ):
        for _ in range(40):
            member.write(bytes(10_000_000))
    assert 'most of them in archive/data/0 (400000000,)' in reason(tmp_path / 'x.pth')


@pytest.mark.parametrize(
    ('shape', 'strides', 'expected'),
    [
        ((2**33, 4), (0, 1), 'become 137,438,953,472 in memory, most of them in w (8589934592, 4)'),
        ((2**62, 0), (1, 1), 'w (4611686018427387904, 0)'),
        ((1,) * 33, (1,) * 33, 'w has 33 axes'),
    ],
)
def test_impossible_sizes_of_a_tensor_are_refused(shape, strides, expected, tmp_path):
    write_pickle(tmp_path / 'x.pth', tensor(shape, strides))
    with zipfile.ZipFile(tmp_path / 'x.pth', 'a') as file:
        file.writestr('archive/data/0', bytes(16))
    assert expected in reason(tmp_path / 'x.pth')


def test_counts_are_limited():
    limits.check_count('layers', 1000)
    with refused('content', value=1001):
        limits.check_count('layers', 1001)
