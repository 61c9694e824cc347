"""ONNX programs that take a photo: their pixels and probabilities equal those of predict."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.support import interop, small
from vit_jax.data import images, resizing
from vit_jax.weights import embedded

SIDE = 32
FITS = ['squash', 'cover', 'torchvision', 'transformers']
# (resize, antialias, uint8_resize)
FILTERS = [
    *itertools.product(['bilinear', 'bicubic', 'lanczos3'], [True], [True, False]),
    *itertools.product(['bilinear', 'bicubic', 'lanczos3'], [False], [False]),
    ('area', True, False),
]
# (height, width): larger and smaller than SIDE, wide, tall, equal on one side or both, one pixel.
SIZES = [(301, 403), (21, 17), (300, 40), (77, 500), (32, 90), (90, 32), (32, 32), (3, 5), (1, 1)]
# From images to two logits, of the mean of all pixels.
PROGRAM = """
<ir_version: 10, opset_import: ["": 23]>
model (float[batch, 32, 32, 3] images) => (float[batch, 2] logits)
<int64[3] axes = {1, 2, 3}, float[1, 2] kernel = {0.5, -1.5}, float[2] bias = {0.1, 0.2}>
{
  means = ReduceMean <keepdims = 0> (images, axes)
  last = Constant <value_ints = [1]> ()
  column = Unsqueeze (means, last)
  scaled = MatMul (column, kernel)
  logits = Add (scaled, bias)
}
"""


def with_preprocess(loss=None, **fields):
    """Weights of a small model of two classes for images of SIDE pixels."""
    given = small.with_classes(small.make('no-position', pool='gap'), ['dark', 'light'])
    preprocess = {**given.preprocess, 'image_size': (SIDE, SIDE), **fields}
    return dataclasses.replace(given, preprocess=preprocess, loss=loss)


def photo(height, width):
    """A decoded photo with waves, hard edges and noise, uint8 [height, width, 3]."""
    y, x = np.mgrid[:height, :width]
    waves = 127 + 127 * np.sin(x / 7 + y / 13)
    edges = 255 * ((x // 9 + y // 5) % 2)
    noise = np.random.default_rng(height).integers(0, 256, (height, width))
    return np.clip(np.stack([waves, edges, noise], -1), 0, 255).astype(np.uint8)


def session(program):
    runtime = interop.require('onnxruntime')
    return runtime.InferenceSession(program.SerializeToString(), providers=['CPUExecutionProvider'])


@pytest.mark.parametrize(('resize', 'antialias', 'uint8_resize'), FILTERS)
@pytest.mark.parametrize('fit', FITS)
def test_prepared_pixels_equal_those_of_predict(fit, resize, antialias, uint8_resize):
    onnx = interop.require('onnx')
    given = with_preprocess(
        fit=fit, resize=resize, antialias=antialias, uint8_resize=uint8_resize, crop_ratio=0.8
    )
    program = onnx.parser.parse_model(embedded.preparation_text(given, 10, 23))
    onnx.checker.check_model(program, full_check=True)
    prepare = session(program)
    for size in SIZES:
        (actual,) = prepare.run(['images'], {'photo': photo(*size)})
        expected = images.prepared(photo(*size), (SIDE, SIDE), given.preprocess)
        assert actual.shape == (1, SIDE, SIDE, 3)
        # Rounded pixels are equal. The others differ by a thousandth of a grey level.
        grey_levels = 255 * np.abs(actual[0] - expected) * np.asarray(given.preprocess['std'])
        assert grey_levels.max() < (1e-4 if uint8_resize else 2e-3), size


def test_an_older_pillow_resizes_the_width_of_every_photo_first(monkeypatch):
    """The order matters for tall photos where a bicubic filter overshoots."""
    onnx = interop.require('onnx')
    given = with_preprocess(fit='squash', resize='bicubic', crop_ratio=1.0)
    pixels = {}
    for is_new in (True, False):
        monkeypatch.setattr(resizing, 'RESIZES_TALL_IMAGES_DOWNWARDS_FIRST', is_new)
        program = onnx.parser.parse_model(embedded.preparation_text(given, 10, 23))
        (pixels[is_new],) = session(program).run(['images'], {'photo': photo(300, 40)})
    assert not np.array_equal(pixels[True], pixels[False])


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_a_photo_goes_in_and_probabilities_come_out(loss):
    onnx = interop.require('onnx')
    given = with_preprocess(loss, fit='torchvision')
    program = onnx.parser.parse_model(PROGRAM)
    whole = embedded.with_preparation(program, given)
    onnx.checker.check_model(whole, full_check=True)
    run = session(whole)
    assert [(value.name, value.type) for value in run.get_inputs()] == [('photo', 'tensor(uint8)')]
    assert [value.name for value in run.get_outputs()] == ['probabilities']
    for size in SIZES:
        (actual,) = run.run(None, {'photo': photo(*size)})
        prepared = images.prepared(photo(*size), (SIDE, SIDE), given.preprocess)
        logits = prepared.mean() * np.array([0.5, -1.5]) + [0.1, 0.2]
        expected = np.exp(logits) / np.exp(logits).sum()
        if loss == 'sigmoid':
            expected = 1 / (1 + np.exp(-logits))
        np.testing.assert_allclose(actual, expected[None], atol=1e-5)
