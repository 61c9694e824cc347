"""Metadata of exported models, and the Python that is printed for them."""

import dataclasses
import json

import numpy as np
import pytest

from tests.support import interop, small
from tests.support.errors import refused
from tests.support.images import picture
from vit_jax import convert, weights
from vit_jax.weights import preparation

SHAPES = {'wide': (40, 90), 'tall': (77, 33), 'small': (11, 9)}
CHAINS = {
    'vision_transformer': dict(fit='squash', crop_ratio=1.0, resize='bilinear', antialias=False),
    'squashed bicubic': dict(fit='squash', crop_ratio=0.8, resize='bicubic', antialias=False),
    'big_vision': dict(fit='cover', crop_ratio=0.875, resize='area', antialias=True),
    'cover': dict(fit='cover', crop_ratio=0.875, resize='lanczos3', antialias=True),
    'timm': dict(
        fit='torchvision', crop_ratio=0.9, resize='bicubic', antialias=True, uint8_resize=True
    ),
    'transformers': dict(
        fit='squash', crop_ratio=1.0, resize='bilinear', antialias=True, uint8_resize=True
    ),
    'clip': dict(
        fit='transformers', crop_ratio=0.875, resize='bicubic', antialias=True, uint8_resize=True
    ),
}


def with_chain(name):
    chain = {'uint8_resize': False} | CHAINS[name]
    given = small.make('vit')
    return dataclasses.replace(given, preprocess=given.preprocess | chain)


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('chain', CHAINS)
def test_printed_lines_prepare_a_photo_like_predict(chain, shape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(*SHAPES[shape]).save('photo.jpg')
    given = with_chain(chain)
    lines = preparation.python_lines(given, 'x.onnx', 'onnx')
    variables = {}
    exec(lines[: lines.index('import onnxruntime')], variables)
    expected = weights.prepare(given, ['photo.jpg'])
    assert variables['images'].dtype == np.float32
    if given.preprocess['uint8_resize']:  # Pillow's pixels, to the bit
        np.testing.assert_allclose(variables['images'], expected, atol=1e-6)
    else:
        np.testing.assert_allclose(variables['images'], expected, atol=1e-4)


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
@pytest.mark.parametrize(
    ('to', 'name'), [('stablehlo', 'x'), pytest.param('onnx', 'x.onnx', marks=pytest.mark.slow)]
)
def test_printed_lines_give_the_probabilities_of_predict(
    to, name, loss, tmp_path, monkeypatch, capsys
):
    if to == 'onnx':
        interop.require('jax2onnx')
        interop.require('onnxruntime')
    monkeypatch.chdir(tmp_path)
    picture(77, 33).save('photo.jpg')
    given = dataclasses.replace(with_chain('timm'), loss=loss)
    weights.save(given, 'source.safetensors', 'vit_jax')
    capsys.readouterr()
    assert convert.main(['source.safetensors', name, f'--to={to}']) == 0
    variables = {}
    exec(capsys.readouterr().out, variables)
    expected = weights.predictor(given)(weights.prepare(given, ['photo.jpg']))[1]
    np.testing.assert_allclose(variables['probabilities'], expected, atol=1e-5)
    assert variables['probabilities'].argmax() == expected.argmax()


@pytest.mark.slow
def test_onnx_files_state_preprocessing_classes_and_loss(tmp_path):
    onnx = interop.require('onnx')
    interop.require('jax2onnx')
    source, path = str(tmp_path / 'source.safetensors'), str(tmp_path / 'x.onnx')
    given = dataclasses.replace(with_chain('timm'), loss='sigmoid')
    weights.save(given, source, 'vit_jax')
    assert convert.main([source, path, '--to=onnx']) == 0
    found = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    preprocess = json.loads(found['vit_jax.preprocess'])
    assert preprocess.pop('image_size') == [16, 16]
    assert preprocess == {
        'fit': 'torchvision',
        'crop_ratio': 0.9,
        'resize': 'bicubic',
        'antialias': True,
        'uint8_resize': True,
        'mean': [0.4, 0.5, 0.6],
        'std': [0.3, 0.2, 0.1],
    }
    assert json.loads(found['vit_jax.classes']) == small.CLASSES
    assert found['vit_jax.loss'] == 'sigmoid'


def test_metadata_omit_classes_and_preprocessing_that_a_model_lacks():
    assert preparation.metadata(small.make('headless')).keys() == {'vit_jax.preprocess'}
    assert preparation.metadata(small.make('rectangle')).keys() == {
        'vit_jax.classes',
        'vit_jax.loss',
    }
    with refused('inapplicable', file='rectangle', value=5):
        preparation.python_lines(small.make('rectangle'), 'x.onnx', 'onnx')
