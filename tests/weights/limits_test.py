"""What small files may ask for, and what is no file."""

import os
import socket
import time
import tracemalloc
import zipfile

import numpy as np
import pytest

from tests.support.containers import refused, tensor, write_pickle
from vit_jax.errors import UserError
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


def test_what_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo('pipe.npz')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind('socket.npz')
        assert refused('socket.npz') == "'socket.npz' is a socket: expected a file."
    assert "'pipe.npz' is a named pipe: expected a file" in refused('pipe.npz')
    assert 'is a device: expected a file' in refused('/dev/zero')
    assert 'is a directory: expected a file' in refused(tmp_path)
    os.mkfifo('model.safetensors.index.json')
    with pytest.raises(UserError, match='index.json. is a named pipe: expected a file'):
        array_files.read_path(str(tmp_path))


def test_nothing_replaces_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / 'x.npz')
    with pytest.raises(UserError, match='x.npz. is a named pipe: name another destination'):
        array_files.check_replaceable(str(tmp_path / 'x.npz'))


def test_header_of_safetensors(tmp_path):
    header = b'{"__metadata__": {"x": "' + b'y' * limits.HEADER + b'"}}'
    (tmp_path / 'x').write_bytes(len(header).to_bytes(8, 'little') + header)
    assert 'its header takes 4,194,331 bytes; at most 4,194,304 are read' in refused(tmp_path / 'x')


def test_pickle_of_a_large_file(tmp_path):
    write_pickle(tmp_path / 'x.pth', b'\x80\x02' + b'}' * limits.PICKLE + b'.')
    assert 'its archive/data.pkl takes 1,048,579 bytes; at most' in refused(tmp_path / 'x.pth')


def test_compressed_zeros_under_a_name_that_nobody_needs(tmp_path):
    with zipfile.ZipFile(tmp_path / 'x.npz', 'w', zipfile.ZIP_DEFLATED) as file:
        with file.open('needed.npy', 'w') as member:
            np.lib.format.write_array(member, np.ones(2))
        with file.open('bomb.npy', 'w', force_zip64=True) as member:
            np.lib.format.write_array_header_1_0(
                member, {'descr': '<f4', 'fortran_order': False, 'shape': (10, 10_000_000)}
            )
            for _ in range(40):
                member.write(bytes(10_000_000))
    message = refused(tmp_path / 'x.npz')
    assert 'become 400,000,016 in memory, most of them as bomb (10, 10000000)' in message
    assert 'at most 20 times as much is read' in message


def test_compressed_record_of_pytorch(tmp_path):
    write_pickle(tmp_path / 'x.pth', tensor((2,), (1,)))
    with (
        zipfile.ZipFile(tmp_path / 'x.pth', 'a', zipfile.ZIP_DEFLATED) as file,
        file.open('archive/data/0', 'w') as member,
    ):
        for _ in range(40):
            member.write(bytes(10_000_000))
    assert 'most of them as archive/data/0 (400000000,)' in refused(tmp_path / 'x.pth')


@pytest.mark.parametrize(
    ('shape', 'strides', 'expected'),
    [
        ((2**33, 4), (0, 1), 'become 137,438,953,472 in memory, most of them as w (8589934592, 4)'),
        ((2**62, 0), (1, 1), 'w (4611686018427387904, 0)'),
        ((1,) * 33, (1,) * 33, 'w has 33 axes'),
    ],
)
def test_sizes_of_a_tensor(shape, strides, expected, tmp_path):
    write_pickle(tmp_path / 'x.pth', tensor(shape, strides))
    with zipfile.ZipFile(tmp_path / 'x.pth', 'a') as file:
        file.writestr('archive/data/0', bytes(16))
    assert expected in refused(tmp_path / 'x.pth')


def test_counts_in_names():
    limits.check_count('layers', 1000)
    with pytest.raises(UserError, match='said to be 1,001 layers: expected at most 1,000'):
        limits.check_count('layers', 1001)
