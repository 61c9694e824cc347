"""Pixels of prediction and the pipeline compared with reimplemented code bases."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.support.images import encode, evaluated, picture
from vit_jax import config
from vit_jax.data import resizing

METHODS = {'bilinear': Image.BILINEAR, 'bicubic': Image.BICUBIC, 'lanczos3': Image.LANCZOS}
SHAPES = {'wide': (40, 90), 'tall': (77, 33), 'small': (11, 9), 'flat': (3, 200), 'fits': (24, 32)}
SIZE = (24, 32)


def plan(fit, height, width, ratio):
    """(size, corner of the crop) with the formulas of the code base."""
    if fit == 'squash':
        new = [int(side / ratio) for side in SIZE]
    elif fit == 'cover':  # big_vision's resize_small rounds; extended to sizes that are not square
        scale = max(
            round(side / ratio) / old for side, old in zip(SIZE, (height, width), strict=True)
        )
        new = [int(np.floor(old * scale + 0.5 + 1e-9)) for old in (height, width)]
    else:
        scale = max(
            int(side / ratio) / old for side, old in zip(SIZE, (height, width), strict=True)
        )
        new = [int(old * scale + 1e-9) for old in (height, width)]
    rest = [n - side for n, side in zip(new, SIZE, strict=True)]
    return new, [round(r / 2) if fit in ('squash', 'torchvision') else r // 2 for r in rest]


def source_chain(pixels, preprocess):
    """Pixels resized as a whole by Pillow (antialiased) or TensorFlow, then cropped; in 0..255."""
    new, (top, left) = plan(preprocess['fit'], *pixels.shape[:2], preprocess['crop_ratio'])
    if preprocess['antialias']:
        whole = np.stack(
            [
                np.asarray(
                    Image.fromarray(pixels[..., c].astype(np.float32)).resize(
                        new[::-1], METHODS[preprocess['resize']]
                    )
                )
                for c in range(3)
            ],
            -1,
        )
    else:
        whole = tf.image.resize(pixels, new, preprocess['resize'], antialias=False).numpy()
    return whole[top : top + SIZE[0], left : left + SIZE[1]]


@pytest.mark.parametrize(
    ('fit', 'ratio'),
    [('squash', 1.0), *((fit, 0.875) for fit in config.FIELDS['preprocess.fit'].values.choices)],
)
@pytest.mark.parametrize('antialias', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    'method', ['bilinear', 'bicubic', pytest.param('lanczos3', marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize('shape', SHAPES)
def test_prediction_and_pipeline_have_the_pixels_of_the_code_base(
    method, antialias, fit, ratio, shape
):
    pixels = np.asarray(picture(*SHAPES[shape]))
    preprocess = dict(
        fit=fit,
        crop_ratio=ratio,
        resize=method,
        antialias=antialias,
        mean=(0.0,) * 3,
        std=(1 / 255,) * 3,
    )
    expected = source_chain(pixels, preprocess)
    ours = resizing.resize_and_central_crop(pixels, SIZE, preprocess)
    assert ours.shape == (*SIZE, 3)
    assert ours.dtype == np.float32
    # The bicubic filter of TensorFlow is a table of 1,024 steps.
    np.testing.assert_allclose(ours, expected, atol=0.3)
    np.testing.assert_allclose(
        evaluated(encode(picture(*SHAPES[shape]), 'PNG'), SIZE, preprocess), ours, atol=0.05
    )


def averaged(pixels, size):
    """The mean over the area of each new pixel, computed by repeating pixels until areas fit."""
    for axis, (old, new) in enumerate(zip(pixels.shape[:2], size, strict=True)):
        repeated = np.repeat(np.moveaxis(pixels, axis, 0), new, axis=0).astype(np.float64)
        means = repeated.reshape(new, old, *repeated.shape[1:]).mean(axis=1)
        pixels = np.moveaxis(means, 0, axis)
    return pixels


@pytest.mark.parametrize(('fit', 'ratio'), [('squash', 1.0), ('squash', 0.875), ('cover', 0.875)])
def test_means_over_areas_are_exact_in_prediction_and_pipeline(fit, ratio):
    """`antialias` has no effect, whether an image shrinks, grows or is cropped."""
    for shape in SHAPES.values():
        pixels = np.asarray(picture(*shape))
        new, (top, left) = plan(fit, *shape, ratio)
        whole = averaged(pixels, new)
        np.testing.assert_allclose(tf.image.resize(pixels, new, 'area'), whole, atol=0.01)
        expected = whole[top : top + SIZE[0], left : left + SIZE[1]]
        preprocess = dict(
            fit=fit,
            crop_ratio=ratio,
            resize='area',
            antialias=True,
            mean=(0.0,) * 3,
            std=(1 / 255,) * 3,
        )
        for antialias in (True, False):
            ours = resizing.resize_and_central_crop(
                pixels, SIZE, {**preprocess, 'antialias': antialias}
            )
            assert (ours.shape, ours.dtype) == ((*SIZE, 3), np.float32)
            np.testing.assert_allclose(ours, expected, atol=1e-3)
        np.testing.assert_allclose(
            evaluated(encode(picture(*shape), 'PNG'), SIZE, preprocess), ours, atol=0.01
        )


def test_areas_of_whole_pixels_equal_the_box_filter_of_pillow():
    pixels = np.asarray(picture(72, 64))
    ours = resizing.resize_and_central_crop(
        pixels, SIZE, dict(fit='squash', crop_ratio=1.0, resize='area', antialias=True)
    )
    box = [
        np.asarray(Image.fromarray(pixels[..., c].astype(np.float32)).resize(SIZE[::-1], Image.BOX))
        for c in range(3)
    ]
    np.testing.assert_allclose(ours, np.stack(box, -1), atol=1e-3)


def test_antialias_changes_an_image_that_shrinks():
    pixels = np.asarray(picture(90, 90))
    with_antialias, without = (
        resizing.resize_and_central_crop(
            pixels, (16, 16), dict(fit='squash', crop_ratio=1.0, resize='bilinear', antialias=x)
        )
        for x in (True, False)
    )
    assert np.abs(with_antialias - without).mean() > 5


@pytest.mark.parametrize('fit', config.FIELDS['preprocess.fit'].values.choices)
@pytest.mark.parametrize('method', METHODS)
def test_uint8_resize_has_the_pixels_of_pillow_itself(method, fit):
    """Hard edges make a filter overshoot; Pillow cuts this off after each pass."""
    edges = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (40, 200, 3))
    settings = dict(
        fit=fit,
        crop_ratio=0.875,
        resize=method,
        antialias=True,
        uint8_resize=True,
        mean=(0.0,) * 3,
        std=(1 / 255,) * 3,
    )
    for height, width in SHAPES.values():
        for pixels in (edges[:height, :width], edges.transpose(1, 0, 2)[:height, :width]):
            image = Image.fromarray(np.ascontiguousarray(pixels))
            (new_height, new_width), (top, left) = plan(fit, image.height, image.width, 0.875)
            whole = np.asarray(image.resize((new_width, new_height), METHODS[method]), float)
            expected = whole[top : top + SIZE[0], left : left + SIZE[1]]
            ours = resizing.resize_and_central_crop(np.asarray(image), SIZE, settings)
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1)
            np.testing.assert_allclose(
                evaluated(encode(image, 'PNG'), SIZE, settings), expected, rtol=0, atol=1.001
            )
            fractions = resizing.resize_and_central_crop(
                np.asarray(image), SIZE, settings | {'uint8_resize': False}
            )
            if method == 'bicubic':
                assert fractions.max() > 256


def test_order_of_the_two_passes_is_the_order_of_the_installed_pillow():
    """Thin images and the page for browsers depend on it."""
    rng = np.random.default_rng(0)
    for height, width, new_height, new_width in rng.integers(20, 120, (60, 4)):
        image = Image.fromarray(rng.choice(np.array([0, 255], np.uint8), (height, width, 3)))
        halfway = (width, new_height), (new_width, height)
        height_first = resizing.is_height_first((height, width), (new_height, new_width))
        by_sides = image
        for size in (halfway[0 if height_first else 1], (new_width, new_height)):
            by_sides = by_sides.resize(size, Image.BICUBIC)
        whole = image.resize((new_width, new_height), Image.BICUBIC)
        np.testing.assert_array_equal(np.asarray(by_sides), np.asarray(whole))
