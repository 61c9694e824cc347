"""Containers: what they hold comes back bit for bit, and nothing in them is executed."""

import io
import json
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.support import interop
from vit_jax.errors import UserError
from vit_jax.weights import files, torch_file

KINDS = ('.npz', '.safetensors', '.pth')
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.int32, bool)


def arrays():
    rng = np.random.default_rng(0)
    drawn = {f'a.{np.dtype(t).name}/x': rng.normal(size=(3, 2, 5)).astype(t) for t in DTYPES}
    return drawn | {'transposed': rng.normal(size=(4, 3)).T, 'scalar': np.float32(3.5).reshape(()),
                    'empty': np.zeros((0, 3), np.float32)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name


@pytest.mark.parametrize('kind', KINDS)
def test_every_dtype_comes_back_bit_for_bit_whatever_the_name(kind, tmp_path):
    path = tmp_path / 'named.anyhow'
    files.write(str(path), arrays(), kind, {'format': 'pt'})
    found, metadata = files.read(str(path))
    assert_same(found, arrays())
    assert metadata == ({'format': 'pt'} if kind == '.safetensors' else {})
    again = tmp_path / 'again'
    files.write(str(again), found, kind, {'format': 'pt'})
    assert again.read_bytes() == path.read_bytes()


def test_pytorch_reads_what_is_written(tmp_path):
    torch = interop.require('torch')
    torch_file.write(tmp_path / 'x.pth', arrays())
    found = torch.load(tmp_path / 'x.pth', weights_only=True)
    assert found.pop('a.bfloat16/x').dtype == torch.bfloat16
    assert_same({k: v.numpy() for k, v in found.items()},
                {k: v for k, v in arrays().items() if k != 'a.bfloat16/x'})


def test_what_pytorch_writes_is_read(tmp_path):
    """Views of one storage, a parameter, and the state of a whole training run."""
    torch = interop.require('torch')
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    module = torch.nn.Linear(3, 2).to(torch.bfloat16)
    state = module.state_dict() | {'view': base[1:3, ::2].T, 'parameter': torch.nn.Parameter(base)}
    torch.save({'epoch': 3, 'state_dict': state, 'optimizer': {'lr': 0.1}}, tmp_path / 'x.pth')
    found, _ = files.read(str(tmp_path / 'x.pth'))
    assert found.keys() == state.keys()
    for name, x in state.items():
        np.testing.assert_array_equal(found[name].astype(np.float32), x.detach().float().numpy())
    torch.save(module.state_dict(), tmp_path / 'y.pth')  # an OrderedDict with attributes
    assert files.read(str(tmp_path / 'y.pth'))[0]['weight'].dtype == ml_dtypes.bfloat16


def test_big_endian_pth(tmp_path):
    """As PyTorch reads it: the record `byteorder` says what storages are."""
    torch = interop.require('torch')
    torch_file.write(tmp_path / 'little.pth', arrays())
    with (zipfile.ZipFile(tmp_path / 'little.pth') as little,
          zipfile.ZipFile(tmp_path / 'big.pth', 'w') as big):
        for name in little.namelist():
            data = little.read(name)
            if name == 'archive/byteorder':
                data = b'big'
            elif name.startswith('archive/data/'):
                x = list(arrays().values())[int(name.removeprefix('archive/data/'))]
                data = np.frombuffer(data, f'u{x.dtype.itemsize}').byteswap().tobytes()
            big.writestr(name, data)
    assert_same(files.read(str(tmp_path / 'big.pth'))[0], arrays())
    theirs = torch.load(tmp_path / 'big.pth', weights_only=True)
    np.testing.assert_array_equal(theirs['transposed'], arrays()['transposed'])


def test_big_endian_npz(tmp_path):
    x = np.arange(6).reshape(2, 3)
    np.savez(tmp_path / 'x.npz', f=x.astype('>f4'), i=x.astype('>i8'))
    assert_same(files.read(str(tmp_path / 'x.npz'))[0],
                {'f': x.astype(np.float32), 'i': x.astype(np.int64)})


def refused(path):
    with pytest.raises(UserError) as error:
        files.read(str(path))
    return str(error.value)


def write_pickle(path, value):
    with zipfile.ZipFile(path, 'w') as file:
        file.writestr('archive/data.pkl', value if isinstance(value, bytes) else
                      pickle.dumps(value, protocol=2))


class Touch:
    """What creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.open, (self.path, os.O_CREAT)


def test_malicious_pth_is_refused_and_not_executed(tmp_path):
    write_pickle(tmp_path / 'bad.pth', {'weight': Touch(tmp_path / 'touched')})
    message = refused(tmp_path / 'bad.pth')
    assert 'it asks for posix.open, which is no part of a tensor; nothing was run' in message
    assert not (tmp_path / 'touched').exists()
    pickle.loads(pickle.dumps(Touch(tmp_path / 'touched')))
    assert (tmp_path / 'touched').exists()  # it would have been


@pytest.mark.parametrize('code', [
    b'cbuiltins\neval\n(S"1"\ntR.',
    b'c__builtin__\ngetattr\n.',
    b'ctorch\nload\n(S"x"\ntR.',
    b'cnumpy.core.multiarray\n_reconstruct\n.',
    b'ccollections\nOrderedDict.__init__.__globals__\n.',
], ids=['eval', 'getattr', 'torch.load', 'numpy', 'attributes'])
def test_nothing_but_tensors_may_be_named(code, tmp_path):
    write_pickle(tmp_path / 'bad.pth', code)
    assert 'nothing was run' in refused(tmp_path / 'bad.pth')


@pytest.mark.parametrize('code', [b'\x80\x02Nr\xff\xff\xff\x7f.', b'Np2000000000\n.',
                                  b'\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.'])
def test_a_few_bytes_cannot_fill_the_memory(code, tmp_path):
    write_pickle(tmp_path / 'bad.pth', code)
    assert 'is damaged or cut short' in refused(tmp_path / 'bad.pth')


TENSOR = (b'\x80\x02}(X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(('
          b'X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ%s}tRu.')


@pytest.mark.parametrize('numbers', [
    b'K\x00(K\x05t(K\x01t', b'K\x02(K\x03t(K\x01t', b'K\x00(K\x02t(K\x04t', b'J\xff\xff\xff\xff'
    b'(K\x02t(K\x01t', b'K\x00(K\x02t(J\xff\xff\xff\xfft', b'K\x00(K\x02t(K\x01K\x01t'],
    ids=['too-long', 'offset', 'stride', 'negative-offset', 'negative-stride', 'ranks'])
def test_tensors_stay_within_their_storage(numbers, tmp_path):
    for sizes in (b'K\x00(K\x04t(K\x01t', numbers):
        write_pickle(tmp_path / 'x.pth', TENSOR.replace(b'%s', sizes + b'\x89'))
        with zipfile.ZipFile(tmp_path / 'x.pth', 'a') as file:
            file.writestr('archive/data/0', np.arange(4, dtype=np.float32).tobytes())
        if sizes is not numbers:
            np.testing.assert_array_equal(files.read(str(tmp_path / 'x.pth'))[0]['w'], range(4))
    assert 'is damaged or cut short' in refused(tmp_path / 'x.pth')


def test_pickled_objects_in_npz(tmp_path):
    np.savez(tmp_path / 'x.npz', fine=np.ones(2), bad=np.array([{}, Touch(tmp_path / 'touched')]))
    assert 'bad holds pickled Python objects, which could run anything' in refused(
        tmp_path / 'x.npz')
    assert not (tmp_path / 'touched').exists()


@pytest.mark.parametrize('dtype', ['F8_E4M3', 'F8_E5M2', 'C64'])
def test_dtypes_that_are_not_supported(dtype, tmp_path):
    end = 64 if dtype == 'C64' else 8
    header = json.dumps({'head.w': {'dtype': dtype, 'shape': [8], 'data_offsets': [0, end]}})
    (tmp_path / 'x').write_bytes(len(header).to_bytes(8, 'little') + header.encode() + bytes(end))
    message = refused(tmp_path / 'x')
    assert f'refused: head.w has dtype {dtype}, which is not supported: expected one of' in message
    assert 'damaged' not in message


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('share', [0.02, 0.5, 0.999])
def test_truncated(kind, share, tmp_path):
    files.write(str(tmp_path / 'x'), {'weight': np.ones((30, 30), np.float32)}, kind)
    whole = (tmp_path / 'x').read_bytes()
    (tmp_path / 'x').write_bytes(whole[:max(12, int(share * len(whole)))])
    assert 'is damaged or cut short' in refused(tmp_path / 'x')


def test_old_pth(tmp_path):
    torch = interop.require('torch')
    torch.save({'w': torch.ones(2)}, tmp_path / 'x.pth', _use_new_zipfile_serialization=False)
    assert 'a bare pickle, as PyTorch wrote before version 1.6' in refused(tmp_path / 'x.pth')


def test_what_is_no_weights_file(tmp_path):
    (tmp_path / 'x.npz').write_text('Dear diary')
    assert "is no weights file: it begins with b'Dear diar', expected an .npz" in refused(
        tmp_path / 'x.npz')
    (tmp_path / 'x.npz').write_text('')
    assert "it begins with b''" in refused(tmp_path / 'x.npz')
    assert 'no file' in refused(tmp_path / 'missing.npz')
    with zipfile.ZipFile(tmp_path / 'x.zip', 'w') as file:
        file.writestr('notes.txt', 'hello')
    assert 'it is a zip file without arrays' in refused(tmp_path / 'x.zip')
    write_pickle(tmp_path / 'x.pth', {'epoch': 3})
    assert 'it holds no dictionary of tensors' in refused(tmp_path / 'x.pth')


def test_directories(tmp_path):
    def message():
        with pytest.raises(UserError) as error:
            files.read_path(str(tmp_path))
        return str(error.value)

    assert 'none: the directory is empty' in message()
    (tmp_path / 'README.md').write_text('hello')
    assert 'none, but README.md' in message()
    for name in ('b.npz', 'a.npz'):
        np.savez(tmp_path / name, x=np.ones(2))
    assert 'several: a.npz, b.npz. Name one of them' in message()


def test_shards(tmp_path):
    safetensors.numpy.save_file({'a': np.ones(2)}, tmp_path / 'model-00001-of-00002.safetensors')
    safetensors.numpy.save_file({'b': np.zeros(3)}, tmp_path / 'model-00002-of-00002.safetensors')
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors", '
                     '"b": "model-00002-of-00002.safetensors"}}')
    (tmp_path / 'config.json').write_text('{"model_type": "vit"}')
    found, _, sidecars = files.read_path(str(tmp_path))
    assert_same(found, {'a': np.ones(2), 'b': np.zeros(3)})
    assert sidecars == {'config.json': {'model_type': 'vit'}}
    os.remove(tmp_path / 'model-00002-of-00002.safetensors')
    with pytest.raises(UserError, match='no file .*model-00002-of-00002.safetensors'):
        files.read_path(str(tmp_path))
    (tmp_path / 'config.json').write_text('{')
    (tmp_path / 'model-00002-of-00002.safetensors').write_bytes(io.BytesIO().getvalue())
    with pytest.raises(UserError, match="it begins with b''"):
        files.read_path(str(tmp_path))


@pytest.mark.parametrize(('name', 'text', 'expected'), [
    ('model.safetensors.index.json', '{}', 'expected weight_map, the file of each array'),
    ('model.safetensors.index.json', '{"weight_map": ["a"]}', "by its name, found ['a']"),
    ('model.safetensors.index.json', '{"weight_map": {"a": 3}}', "by its name, found {'a': 3}"),
    ('model.safetensors.index.json', '["a"]', 'index.json holds ["a"], expected an object'),
    ('config.json', 'null', 'config.json holds null, expected an object')])
def test_json_of_another_shape(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text)
    if name == 'config.json':
        np.savez(tmp_path / 'x.npz', x=np.ones(2))
    with pytest.raises(UserError) as error:
        files.read_path(str(tmp_path))
    assert expected in str(error.value)
