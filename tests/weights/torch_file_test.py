"""PyTorch's files: written by PyTorch, read without it, and nothing in them is executed."""

import pickle
import re
import sys
import time
import zipfile

import ml_dtypes
import numpy as np
import pytest

from tests.support import interop
from tests.support.containers import (
    Touch,
    arrays,
    assert_same,
    read_error,
    reason,
    tensor,
    write_pickle,
)
from tests.support.errors import refused
from vit_jax.weights import array_files, torch_file


def test_pytorch_reads_written_files(tmp_path):
    torch = interop.require('torch')
    torch_file.write(tmp_path / 'x.pth', arrays())
    found = torch.load(tmp_path / 'x.pth', weights_only=True)
    assert found.pop('a.bfloat16/x').dtype == torch.bfloat16
    assert_same(
        {k: v.numpy() for k, v in found.items()},
        {k: v for k, v in arrays().items() if k != 'a.bfloat16/x'},
    )


def test_files_of_pytorch_are_read(tmp_path):
    """Views of one storage, a parameter, and the state of a whole training run."""
    torch = interop.require('torch')
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    module = torch.nn.Linear(3, 2).to(torch.bfloat16)
    state = module.state_dict() | {'view': base[1:3, ::2].T, 'parameter': torch.nn.Parameter(base)}
    torch.save({'epoch': 3, 'state_dict': state, 'optimizer': {'lr': 0.1}}, tmp_path / 'x.pth')
    found, _ = array_files.read(str(tmp_path / 'x.pth'))
    assert found.keys() == state.keys()
    for name, x in state.items():
        np.testing.assert_array_equal(found[name].astype(np.float32), x.detach().float().numpy())
    torch.save(module.state_dict(), tmp_path / 'y.pth')  # an OrderedDict with attributes
    assert array_files.read(str(tmp_path / 'y.pth'))[0]['weight'].dtype == ml_dtypes.bfloat16


def test_big_endian_pth_is_read(tmp_path):
    """The record `byteorder` states the order of the bytes in storages, as in PyTorch."""
    torch = interop.require('torch')
    torch_file.write(tmp_path / 'little.pth', arrays())
    with (
        zipfile.ZipFile(tmp_path / 'little.pth') as little,
        zipfile.ZipFile(tmp_path / 'big.pth', 'w') as big,
    ):
        for name in little.namelist():
            data = little.read(name)
            if name == 'archive/byteorder':
                data = b'big'
            elif name.startswith('archive/data/'):
                x = list(arrays().values())[int(name.removeprefix('archive/data/'))]
                data = np.frombuffer(data, f'u{x.dtype.itemsize}').byteswap().tobytes()
            big.writestr(name, data)
    assert_same(array_files.read(str(tmp_path / 'big.pth'))[0], arrays())
    theirs = torch.load(tmp_path / 'big.pth', weights_only=True)
    np.testing.assert_array_equal(theirs['transposed'], arrays()['transposed'])


def test_malicious_pth_is_refused_and_not_executed(tmp_path):
    write_pickle(tmp_path / 'bad.pth', {'weight': Touch(tmp_path / 'touched')})
    error = read_error(tmp_path / 'bad.pth')
    assert error.value == 'posix.open'
    assert 'it uses posix.open, which is not part of a tensor; nothing was run' in str(error)
    assert not (tmp_path / 'touched').exists()
    pickle.loads(pickle.dumps(Touch(tmp_path / 'touched')))
    assert (tmp_path / 'touched').exists()  # Python's own reader runs it


@pytest.mark.parametrize(
    'code',
    [
        b'cbuiltins\neval\n(S"1"\ntR.',
        b'c__builtin__\ngetattr\n.',
        b'ctorch\nload\n(S"x"\ntR.',
        b'cnumpy.core.multiarray\n_reconstruct\n.',
        b'ccollections\nOrderedDict.__init__.__globals__\n.',
    ],
    ids=['eval', 'getattr', 'torch.load', 'numpy', 'attributes'],
)
def test_nothing_but_tensors_may_be_named(code, tmp_path):
    write_pickle(tmp_path / 'bad.pth', code)
    assert 'nothing was run' in reason(tmp_path / 'bad.pth')


@pytest.mark.parametrize(
    'code',
    [
        b'\x80\x02Nr\xff\xff\xff\x7f.',
        b'Np2000000000\n.',
        b'\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.',
    ],
)
def test_a_few_bytes_cannot_fill_the_memory(code, tmp_path):
    write_pickle(tmp_path / 'bad.pth', code)
    message = reason(tmp_path / 'bad.pth')
    assert 'is damaged or cut short' in message or 'it has no dictionary of tensors' in message


TENSOR = (
    b'\x80\x02}(X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(('
    b'X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ%s}tRu.'
)


@pytest.mark.parametrize(
    'numbers',
    [
        b'K\x00(K\x05t(K\x01t',
        b'K\x02(K\x03t(K\x01t',
        b'K\x00(K\x02t(K\x04t',
        b'J\xff\xff\xff\xff(K\x02t(K\x01t',
        b'K\x00(K\x02t(J\xff\xff\xff\xfft',
        b'K\x00(K\x02t(K\x01K\x01t',
    ],
    ids=['too-long', 'offset', 'stride', 'negative-offset', 'negative-stride', 'ranks'],
)
def test_tensors_stay_within_their_storage(numbers, tmp_path):
    for sizes in (b'K\x00(K\x04t(K\x01t', numbers):
        write_pickle(tmp_path / 'x.pth', TENSOR.replace(b'%s', sizes + b'\x89'))
        with zipfile.ZipFile(tmp_path / 'x.pth', 'a') as file:
            file.writestr('archive/data/0', np.arange(4, dtype=np.float32).tobytes())
        if sizes is not numbers:
            np.testing.assert_array_equal(
                array_files.read(str(tmp_path / 'x.pth'))[0]['w'], range(4)
            )
    assert 'is damaged or cut short' in reason(tmp_path / 'x.pth')


NESTED = b'K\x01' + b'2\x86' * 30  # a tuple of two tuples of two tuples ...


@pytest.mark.parametrize(
    'code',
    [
        tensor((4,), key=NESTED),
        tensor(NESTED),
        tensor((4,), strides=NESTED),
        tensor(b'(' + NESTED + b't'),
        tensor((4,), key=NESTED.replace(b'2', b'q\x00h\x00')),
        tensor(NESTED.replace(b'2', b'q\x00h\x00')),
        b'\x80\x04' + 2 * NESTED.replace(b'2', b'q\x00h\x00') + b'\x93.',
        tensor((4,)).replace(b'ctorch\nFloatStorage\n', NESTED.replace(b'2', b'q\x00h\x00')),
    ],
    ids=['key', 'shape', 'strides', 'length', 'memo-key', 'memo-shape', 'name', 'storage'],
)
def test_nested_tuples_take_no_time(code, tmp_path):
    """Python's own reader would hash these 203 bytes for more than 90 s."""
    start = time.process_time()
    write_pickle(tmp_path / 'x.pth', code)
    assert re.search(
        'is damaged or cut short|it is a pickle with DUP, which no file of tensors '
        'has; nothing was run',
        reason(tmp_path / 'x.pth'),
    )
    assert time.process_time() - start < 5


def test_two_tensors_of_one_name_are_refused(tmp_path):
    twice = tensor((4,))
    write_pickle(tmp_path / 'x.pth', twice[:-1] + twice[3:])
    assert 'a str is no new key of a dictionary' in reason(tmp_path / 'x.pth')


def test_tensors_of_one_storage_share_its_memory(tmp_path):
    torch = interop.require('torch')
    base = torch.arange(12.0)
    torch.save({str(k): base[k:] for k in range(12)}, tmp_path / 'x.pth')
    found, _ = array_files.read(str(tmp_path / 'x.pth'))
    np.testing.assert_array_equal(found['9'], [9, 10, 11])
    assert np.shares_memory(found['0'], found['9'])


def test_pth_of_old_versions_is_refused(tmp_path):
    torch = interop.require('torch')
    torch.save({'w': torch.ones(2)}, tmp_path / 'x.pth', _use_new_zipfile_serialization=False)
    assert 'is a bare pickle, the format of PyTorch before version 1.6' in reason(
        tmp_path / 'x.pth'
    )


def test_without_pytorch_pth_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    with refused('missing', file=tmp_path / 'x'):
        array_files.write(str(tmp_path / 'x'), arrays(), '.pth')
    assert not any(tmp_path.iterdir())
