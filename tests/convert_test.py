"""The command that converts: what it writes, how it verifies, what it refuses."""

import dataclasses
import importlib.util
import logging
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.support import interop, small
from tests.support.runs import ROOT, check_message, environment
from vit_jax import weights
from vit_jax.config import base
from vit_jax.convert import convert, main
from vit_jax.errors import UserError
from vit_jax.weights import export, peers


@pytest.fixture
def source(tmp_path):
    """Writes a small model as a file of this project: (name of small.MODELS, fields) -> path."""
    def write(name='vit', **change):
        path = str(tmp_path / f'{name}.safetensors')
        weights.save(small.make(name, **change), path, 'vit_jax')
        return path
    return write


def run(*arguments):
    return subprocess.run([sys.executable, '-m', 'vit_jax.convert', *map(str, arguments)], cwd=ROOT,
                          env=environment(), text=True, capture_output=True, timeout=120,
                          check=False)


def test_command(source, tmp_path):
    result = run(source(), tmp_path / 'x.npz', '--to=google', '--dtype=bfloat16')
    assert result.returncode == 0, result.stderr
    assert 'x.npz (google): 209,351 parameters, bfloat16, 7 classes' in result.stderr
    found = weights.load(str(tmp_path / 'x.npz'))
    assert found.params['cls'].dtype == ml_dtypes.bfloat16
    check_message(run(source(), tmp_path / 'x.npz', '--to=google'),
                  'x.npz is there already: name another destination, or add --overwrite.')


@pytest.mark.parametrize(('arguments', 'message'), [
    (['missing.npz', 'x', '--to=timm'], "error: no file 'missing.npz': expected a file, a"),
    (['setup.py', 'x', '--to=timm'], 'error: setup.py is no weights file: it begins with b'),
    (['setup.py', 'x', '--to=onnx'], "error: 'x' is no name for onnx: a name ending in .onnx is"),
    (['setup.py', 'x.onnx', '--to=huggingface'], "error: 'x.onnx' is no name for huggingface"),
])
def test_messages_of_the_command(arguments, message):
    check_message(run(*arguments), message)


@pytest.mark.parametrize(('arguments', 'message'), [
    (['a.npz', '--to=timm'], 'the following arguments are required: DST'),
    (['a', 'b'], 'the following arguments are required: --to'),
    (['a', 'b', '--to=tim'], "invalid choice: 'tim' (choose from "),
])
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def verified(caplog):
    return next(line for line in caplog.messages if line.startswith('verified by '))


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger='vit_jax')


@pytest.mark.parametrize(('model', 'to', 'name', 'how'), [
    ('vit', 'timm', 'x', 'timm '), ('map', 'timm', 'x.pth', 'timm '),
    ('gap', 'google', 'x.npz', 'the .npz reader of timm'),
    ('vit', 'huggingface', 'x', 'transformers '),
    ('hidden-head', 'torchvision', 'x.pth', 'torchvision ' if importlib.util.find_spec(
        'torchvision') else 'reading back, because a program that reads torchvision cannot be'),
    ('hidden-head', 'google', 'x.npz', 'reading back, because timm computes this model by other'),
    ('axial', 'vit_jax', 'x.safetensors', "reading back, because layout vit_jax is this project's"),
])
def test_verified_by_the_other_program_where_that_is_possible(model, to, name, how, source,
                                                              tmp_path, caplog):
    interop.import_timm()
    interop.require('transformers')
    inexact = name == 'x.pth'
    convert(source(model), str(tmp_path / name), to, verify=True, inexact=inexact)
    assert verified(caplog).startswith(f'verified by {how}')
    assert ('--inexact, with --dtype if given, changed logits by up to' in caplog.text) == inexact


@pytest.mark.parametrize(('to', 'dtype', 'how'), [
    ('timm', None, 'timm '), ('onnx', None, 'onnxruntime '), ('onnx', 'bfloat16', 'onnxruntime '),
    ('stablehlo', 'bfloat16', 'jax.export '),
    ('google', 'bfloat16', 'reading back, because timm reads no bfloat16')])
def test_models_trained_in_bfloat16_are_verified_in_float32(to, dtype, how, source, tmp_path,
                                                            caplog):
    interop.import_timm()
    interop.require('jax2onnx')
    path = str(tmp_path / {'timm': 'x', 'google': 'x.npz'}.get(to, f'x.{to}'))
    convert(source('gap', dtype='bfloat16'), path, to, verify=True, dtype=dtype)
    assert verified(caplog).startswith(f'verified by {how}')


def test_what_weights_do_not_say(source, tmp_path, caplog):
    path, names = str(tmp_path / 'x.npz'), tmp_path / 'names.txt'
    convert(source(), path, 'google')
    assert (f'not in {path}, to be said where it is used: resize=bicubic, crop_ratio=0.8, '
            'mean=(0.4, 0.5, 0.6), std=(0.3, 0.2, 0.1), the names of the classes') in caplog.text
    convert(source('rectangle'), path, 'google', overwrite=True)
    assert 'std=(0.3, 0.2, 0.1), image_size=(16, 12), the names' in caplog.text
    convert(source(), path, 'google', overwrite=True)
    names.write_text('\n'.join(small.CLASSES))
    convert(path, str(tmp_path / 'x'), 'huggingface', preprocess=['mean=0.1,0.2,0.3'],
            classes=str(names))
    assert f'{path} does not say crop_ratio, resize, std of images: taken are' in caplog.text
    found = weights.load(str(tmp_path / 'x'))
    assert found.classes == small.CLASSES
    assert found.preprocess.pop('crop_ratio') == 16 / round(16 / base().preprocess.crop_ratio)
    assert found.preprocess == dict(image_size=(16, 16), resize='bilinear', mean=(0.1, 0.2, 0.3),
                                    std=base().preprocess.std)


def test_directories_for_timm_say_how_images_are_prepared(source, tmp_path):
    convert(source(), str(tmp_path / 'x.npz'), 'google')  # which says nothing
    convert(str(tmp_path / 'x.npz'), str(tmp_path / 'x'), 'timm')
    assert weights.load(str(tmp_path / 'x')).preprocess == dict(
        base().preprocess, image_size=(16, 16))


def test_inexact_is_asked_for(source, tmp_path):
    path = str(tmp_path / 'x.pth')
    with pytest.raises(UserError, match="exactly:\n  model.gelu is 'tanh', there it is 'erf'\nWith "
                                        '--inexact it is written nevertheless'):
        convert(source(), path, 'torchvision')
    convert(source(), path, 'torchvision', inexact=True)
    assert weights.load(path).model['gelu'] == 'erf'
    with pytest.raises(UserError, match="cannot hold this model:\n  model.pool is 'gap'"):
        convert(source('gap'), str(tmp_path / 'y.pth'), 'torchvision', inexact=True)


@pytest.mark.parametrize('error', [2e-4, np.nan])
def test_a_difference_is_an_error(error, source, tmp_path, monkeypatch):
    def wrong(given, path, to, images):
        return small.logits(given, images) + error, 'a program with a mistake'

    monkeypatch.setattr(peers, 'logits', wrong)
    with pytest.raises(UserError, match='at most 0.0001 was expected'):
        convert(source(), str(tmp_path / 'x'), 'timm', verify=True)


def test_overwriting(source, tmp_path):
    convert(source(), str(tmp_path / 'x'), 'timm')
    with pytest.raises(UserError, match='x is there already'):
        convert(source(), str(tmp_path / 'x'), 'huggingface')
    convert(source(), str(tmp_path / 'x'), 'huggingface', overwrite=True)
    assert weights.load(str(tmp_path / 'x')).layout == 'huggingface'
    (tmp_path / 'x/thesis.tex').write_text('')
    for to in ('timm', 'stablehlo'):
        with pytest.raises(UserError, match=r'holds more than weights \(thesis.tex\)'):
            convert(source(), str(tmp_path / 'x'), to, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ['vit.safetensors', 'x']


def assert_runs(given, path, to):
    """The file gives our logits for batches of any size."""
    for number in (1, 3):
        images = small.images(given, number)
        found, _ = export.run(path, to, images)
        expected = small.logits(given, images)
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize('model', [
    'vit', pytest.param('hybrid', marks=pytest.mark.slow),
    pytest.param('bit', marks=pytest.mark.slow)])
def test_stablehlo(model, tmp_path):
    path = str(tmp_path / 'x')
    export.save(small.make(model), path, 'stablehlo')
    assert_runs(small.make(model), path, 'stablehlo')
    with open(path, 'rb') as file:
        exported = jax.export.deserialize(bytearray(file.read()))
    assert exported.platforms == ('cpu', 'cuda', 'tpu')
    assert 'stablehlo.dot_general' in exported.mlir_module()


@pytest.mark.parametrize(('model', 'large'), [
    ('vit', False), pytest.param('map', True, marks=pytest.mark.slow),
    pytest.param('axial', False, marks=pytest.mark.slow)])
def test_onnx(model, large, tmp_path, monkeypatch, source, caplog):
    interop.require('jax2onnx')
    interop.require('onnxruntime')
    path = str(tmp_path / 'x.onnx')
    if large:
        monkeypatch.setattr(export, 'LARGEST_FILE', 0)
    for _ in range(2 if large else 1):
        convert(source(model), path, 'onnx', verify=True, overwrite=True)
    assert verified(caplog).startswith('verified by onnxruntime')
    assert_runs(small.make(model), path, 'onnx')
    assert sorted(os.listdir(tmp_path)) == [f'{model}.safetensors', 'x.onnx',
                                            *(['x.onnx.data'] if large else [])]


def test_what_onnx_cannot_do(tmp_path, monkeypatch):
    interop.require('jax2onnx')
    with pytest.raises(UserError, match='cannot convert the max-pooling of a ResNet'):
        export.save(small.make('hybrid'), str(tmp_path / 'x.onnx'), 'onnx')
    vit = small.make('vit')
    half = dataclasses.replace(vit, params=jax.tree.map(np.float16, vit.params))
    with pytest.raises(UserError, match='float16 arrays .* add --dtype=float32 or'):
        export.save(half, str(tmp_path / 'x.onnx'), 'onnx')
    monkeypatch.setitem(sys.modules, 'jax2onnx', None)
    with pytest.raises(UserError, match=r'ONNX needs more .*: pip install -e "\.\[onnx\]"'):
        export.save(small.make('vit'), str(tmp_path / 'x.onnx'), 'onnx')
    assert not any(tmp_path.iterdir())
