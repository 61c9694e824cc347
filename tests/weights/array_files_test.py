"""Files of arrays: exact round trips, errors for other files, and no execution of code."""

import json
import os
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from tests.support import interop
from tests.support.containers import Touch, arrays, assert_same, read_error, reason, write_pickle
from tests.support.errors import refused
from vit_jax.weights import array_files

KINDS = ('.npz', '.safetensors', '.pth')


def require_writer(kind):
    if kind == '.pth':
        interop.require('torch')


@pytest.mark.parametrize('kind', KINDS)
def test_every_dtype_is_read_back_bit_identical_under_any_name(kind, tmp_path):
    require_writer(kind)
    path = tmp_path / 'named.anyhow'
    array_files.write(str(path), arrays(), kind, {'format': 'pt'})
    found, metadata = array_files.read(str(path))
    assert_same(found, arrays())
    assert metadata == ({'format': 'pt'} if kind == '.safetensors' else {})
    again = tmp_path / 'again'
    array_files.write(str(again), found, kind, {'format': 'pt'})
    assert again.read_bytes() == path.read_bytes()


def test_big_endian_npz_is_read(tmp_path):
    x = np.arange(6).reshape(2, 3)
    np.savez(tmp_path / 'x.npz', f=x.astype('>f4'), i=x.astype('>i8'))
    assert_same(
        array_files.read(str(tmp_path / 'x.npz'))[0],
        {'f': x.astype(np.float32), 'i': x.astype(np.int64)},
    )


def test_pickled_objects_in_npz_are_refused_and_not_executed(tmp_path):
    np.savez(tmp_path / 'x.npz', fine=np.ones(2), bad=np.array([{}, Touch(tmp_path / 'touched')]))
    assert read_error(tmp_path / 'x.npz').field == 'bad'
    assert not (tmp_path / 'touched').exists()


@pytest.mark.parametrize('dtype', ['F8_E4M3', 'F8_E5M2', 'C64'])
def test_unsupported_dtypes_are_refused(dtype, tmp_path):
    end = 64 if dtype == 'C64' else 8
    header = json.dumps({'head.w': {'dtype': dtype, 'shape': [8], 'data_offsets': [0, end]}})
    (tmp_path / 'x').write_bytes(len(header).to_bytes(8, 'little') + header.encode() + bytes(end))
    error = read_error(tmp_path / 'x')
    assert (error.field, error.value) == ('head.w', dtype)
    assert f'x was refused: head.w has dtype {dtype}, which is not supported' in str(error)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('share', [0.02, 0.5, 0.999])
def test_truncated_files_are_refused(kind, share, tmp_path):
    require_writer(kind)
    array_files.write(str(tmp_path / 'x'), {'weight': np.ones((30, 30), np.float32)}, kind)
    whole = (tmp_path / 'x').read_bytes()
    (tmp_path / 'x').write_bytes(whole[: max(12, int(share * len(whole)))])
    assert 'is damaged or cut short' in reason(tmp_path / 'x')


def test_other_files_are_refused(tmp_path):
    (tmp_path / 'x.npz').write_text('Dear diary')
    assert "is not a weights file: it begins with b'Dear diar', expected an .npz" in reason(
        tmp_path / 'x.npz'
    )
    (tmp_path / 'x.npz').write_text('')
    assert read_error(tmp_path / 'x.npz').value == b''
    read_error(tmp_path / 'missing.npz', 'missing')
    with zipfile.ZipFile(tmp_path / 'x.zip', 'w') as file:
        file.writestr('notes.txt', 'hello')
    assert 'it is a zip file without arrays' in reason(tmp_path / 'x.zip')
    write_pickle(tmp_path / 'x.pth', {'epoch': 3})
    assert 'it has no dictionary of tensors' in reason(tmp_path / 'x.pth')


def test_directories_without_a_single_model_are_refused(tmp_path):
    def message(kind):
        with refused(kind, file=tmp_path) as error:
            array_files.read_path(str(tmp_path))
        return str(error.value)

    assert 'none: the directory is empty' in message('missing')
    (tmp_path / 'README.md').write_text('hello')
    assert 'none, but README.md' in message('missing')
    for name in ('b.npz', 'a.npz'):
        np.savez(tmp_path / name, x=np.ones(2))
    assert 'several: a.npz, b.npz. Name one of them' in message('conflict')


def test_shards_are_read_as_one_model(tmp_path):
    safetensors.numpy.save_file({'a': np.ones(2)}, tmp_path / 'model-00001-of-00002.safetensors')
    safetensors.numpy.save_file({'b': np.zeros(3)}, tmp_path / 'model-00002-of-00002.safetensors')
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", '
        '"b": "model-00002-of-00002.safetensors"}}'
    )
    (tmp_path / 'config.json').write_text('{"model_type": "vit"}')
    found, _, sidecars = array_files.read_path(str(tmp_path))
    assert_same(found, {'a': np.ones(2), 'b': np.zeros(3)})
    assert sidecars == {'config.json': {'model_type': 'vit'}}
    second = tmp_path / 'model-00002-of-00002.safetensors'
    second.unlink()
    with refused('missing', file=second):
        array_files.read_path(str(tmp_path))
    second.write_bytes(b'')
    with refused('content', file=second, value=b''):
        array_files.read_path(str(tmp_path))


@pytest.mark.parametrize('name', ['../outside.safetensors', '/outside.safetensors', 'a/../../x'])
def test_shards_stay_in_their_directory(name, tmp_path):
    directory = tmp_path / 'model'
    directory.mkdir()
    safetensors.numpy.save_file({'a': np.ones(2)}, tmp_path / 'outside.safetensors')
    name = name if name[0] != '/' else f'{tmp_path}{name}'
    index = directory / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': {'a': name}}))
    with refused('content', field='weight_map', file=index, value=name):
        array_files.read_path(str(directory))


def test_shards_with_an_array_in_common_are_refused(tmp_path):
    for k in (1, 2):
        safetensors.numpy.save_file({'a': np.full(2, k)}, tmp_path / f'{k}.safetensors')
    (tmp_path / 'model.safetensors.index.json').write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    with refused('content', file=tmp_path / '2.safetensors', value='a'):
        array_files.read_path(str(tmp_path))


@pytest.mark.parametrize(
    ('name', 'text', 'field', 'value'),
    [
        ('model.safetensors.index.json', '{}', None, {}),
        ('model.safetensors.index.json', '{"weight_map": ["a"]}', 'weight_map', ['a']),
        ('model.safetensors.index.json', '{"weight_map": {"a": 3}}', 'weight_map', {'a': 3}),
        ('model.safetensors.index.json', '["a"]', None, ['a']),
        ('config.json', 'null', None, None),
    ],
)
def test_json_of_another_shape_is_refused(name, text, field, value, tmp_path):
    (tmp_path / name).write_text(text)
    if name == 'config.json':
        np.savez(tmp_path / 'x.npz', x=np.ones(2))
    with refused('content', field=field, file=tmp_path / name, value=value):
        array_files.read_path(str(tmp_path))


@pytest.mark.parametrize('name', ['.', 'link', 'directory/'])
def test_a_directory_is_replaced_under_any_name(name, tmp_path, monkeypatch):
    """It may be the current directory, or the name may be a link to it."""
    directory = tmp_path / 'directory'
    directory.mkdir()
    (directory / 'config.json').write_text('old')
    (tmp_path / 'link').symlink_to('directory')
    monkeypatch.chdir(directory if name == '.' else tmp_path)
    with array_files.replacing(name) as temporary:
        assert (directory / 'config.json').read_text() == 'old'
        os.mkdir(temporary)
        with open(f'{temporary}/config.json', 'w', encoding='utf-8') as file:
            file.write('new')
    assert (directory / 'config.json').read_text() == 'new'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['directory', 'link']
    assert (tmp_path / 'link').is_symlink()


def test_a_directory_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x/config.json').write_text('old')

    def busy(*_):
        raise OSError(16, 'Device or resource busy')

    monkeypatch.setattr(os, 'rename', busy)  # as for a mounted directory
    with (
        refused('unwritable', file=tmp_path / 'x'),
        array_files.replacing(str(tmp_path / 'x')) as temporary,
    ):
        os.mkdir(temporary)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob('*')] == [
        'x',
        'x/config.json',
    ]


def test_the_state_of_a_trainer_is_ignored(tmp_path):
    np.savez(tmp_path / 'pytorch_model.bin.npz', x=np.ones(2))
    (tmp_path / 'pytorch_model.bin.npz').rename(tmp_path / 'pytorch_model.bin')
    for name in ('optimizer.pt', 'rng_state.pth', 'rng_state_0.pth', 'scheduler.pt', 'scaler.pt'):
        (tmp_path / name).write_text('no weights')
    assert list(array_files.read_path(str(tmp_path)).arrays) == ['x']
