"""The operations of RandAugment compared with Pillow, or with NumPy where the source differs."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps
from scipy import stats

from tests.support.images import picture
from tests.support.photos import needs_photos, photos
from vit_jax.data import order, randaugment

MAGNITUDES = (0, 5, 10, 15, 20)  # blending at magnitude 5 leaves an image unchanged
SETTINGS = {'num_ops': 2, 'magnitude': 10, 'translate': 100, 'cutout': 40}


def settings(magnitude, **changes):
    return SETTINGS | {'magnitude': magnitude} | changes


def cut(x):
    """Converts floats to 8 bits as the source does."""
    return np.clip(x, 0, 255).astype(np.uint8)


def blend(start, end, m):
    start = np.asarray(start, np.float32)
    end = np.asarray(end, np.float32)
    return cut(start + np.float32(m / 10 * 1.8 + 0.1) * (end - start))


def grey(x):
    light = np.float32(x) / np.float32(255) @ np.array([0.2989, 0.5870, 0.1140], np.float32)
    return np.repeat(cut(light * np.float32(255.5))[..., None], 3, -1)


def smooth(x):
    total = sum(
        x[i : i + len(x) - 2, j : j + x.shape[1] - 2].astype(int) * (5 if i == j == 1 else 1)
        for i in range(3)
        for j in range(3)
    )
    result = x.copy()
    result[1:-1, 1:-1] = total // 13
    return result


def nearest(numbers):
    """The nearest whole numbers; halves are rounded away from 0."""
    return np.trunc(numbers + np.copysign(np.float32(0.5), numbers)).astype(int)


def affine(x, matrix):
    """Pixels nearest to matrix @ (x, y, 1), grey outside. Ties are decided in float32."""
    a, b, c, d, e, f = np.float32(matrix)
    row, column = np.float32(np.indices(x.shape[:2]))
    at_x = nearest(a * column + b * row + c)
    at_y = nearest(d * column + e * row + f)
    inside = (at_x >= 0) & (at_x < x.shape[1]) & (at_y >= 0) & (at_y < x.shape[0])
    moved = np.full_like(x, 128)
    moved[inside] = x[at_y[inside], at_x[inside]]
    return moved


def rotated(x, degrees):
    angle = np.float32(degrees) * np.float32(math.pi / 180)
    c = np.cos(angle)
    s = np.sin(angle)
    height, width = np.float32(x.shape[:2]) - 1
    return affine(
        x,
        [
            c,
            -s,
            (width - (c * width - s * height)) / 2,
            s,
            c,
            (height - (s * width + c * height)) / 2,
        ],
    )


def square(x, m, centre):
    x = x.copy()
    reach = int(m / 10 * 40)
    row, column = (c % side for c, side in zip(centre, x.shape[:2], strict=True))
    x[max(row - reach, 0) : row + reach, max(column - reach, 0) : column + reach] = 128
    return x


def pillow(operation, *args):
    return lambda x, *_: np.asarray(operation(Image.fromarray(x), *args))


def expected(name, x, m, sign, centre):
    """The result of an operation of big_vision, reimplemented.

    Args:
      x: pixels.
      m: magnitude.
      sign: -1 or 1.
      centre: two numbers.
    """
    return {
        'auto_contrast': lambda: np.stack([stretched(c) for c in np.moveaxis(x, -1, 0)], -1),
        'equalize': lambda: pillow(ImageOps.equalize)(x),
        'invert': lambda: pillow(ImageOps.invert)(x),
        'rotate': lambda: rotated(x, sign * 3 * m),
        'posterize': lambda: pillow(ImageOps.posterize, max(int(m / 10 * 4), 1))(x),
        'solarize': lambda: pillow(ImageOps.solarize, int(m / 10 * 256) % 256)(x),
        'solarize_add': lambda: np.where(x < 128, np.minimum(x.astype(int) + 11 * m, 255), x),
        'color': lambda: blend(grey(x), x, m),
        'contrast': lambda: blend(min(x.shape[0] * x.shape[1] // 256, 255), x, m),
        'brightness': lambda: blend(0, x, m),
        'sharpness': lambda: blend(smooth(x), x, m),
        'shear_x': lambda: affine(x, [1, sign * 0.03 * m, 0, 0, 1, 0]),
        'shear_y': lambda: affine(x, [1, 0, 0, sign * 0.03 * m, 1, 0]),
        'translate_x': lambda: affine(x, [1, 0, sign * 10 * m, 0, 1, 0]),
        'translate_y': lambda: affine(x, [1, 0, 0, 0, 1, sign * 10 * m]),
        'cutout': lambda: square(x, m, centre),
    }[name]()


def stretched(channel):
    low = np.float32(channel.min())
    high = np.float32(channel.max())
    if high == low:
        return channel
    scale = np.float32(255) / (high - low)
    return cut(channel * scale + -low * scale)


@functools.cache
def operation(name, magnitude):
    return tf.function(
        lambda image, sign, centre: randaugment.OPERATIONS[name](
            image, settings(magnitude), randaugment.Draw(0, sign, centre)
        ),
        autograph=False,
    )


def assert_equal(result, wanted, name, m):
    """Asserts equal bits; except for 'color', where float32 may round grey differently."""
    if name == 'color':
        difference = np.abs(result.astype(int) - wanted)
        assert difference.max() <= math.ceil(abs(m / 10 * 1.8 - 0.9))
        assert (difference > 0).mean() < 1e-3
    else:
        np.testing.assert_array_equal(result, wanted)


def check(images, name, magnitudes=MAGNITUDES):
    rng = np.random.default_rng(len(name))
    for number, x in enumerate(images):
        for m in magnitudes:
            sign = (-1) ** number
            centre = rng.integers(0, 2**32, 2)
            result = operation(name, m)(
                tf.constant(x), tf.constant(float(sign)), tf.constant(centre)
            ).numpy()
            assert result.dtype == np.uint8
            assert_equal(result, expected(name, x, m, sign, centre), name, m)


def pictures():
    """A noisy picture, a grey one, one with two colours, one with one colour."""
    x = np.asarray(picture(40, 61))
    flat = np.full((33, 20, 3), 77, np.uint8)
    split = flat.copy()
    split[:, 10:] = 200
    return [x, np.asarray(picture(50, 30, 'L').convert('RGB')), split, flat]


@pytest.mark.parametrize('name', randaugment.OPERATIONS)
def test_operations_equal_the_operations_of_big_vision(name):
    noisy, _, of_two_colours, _ = pictures()
    check([noisy, of_two_colours], name)


@pytest.mark.nightly
@needs_photos
@pytest.mark.parametrize('name', randaugment.OPERATIONS)
def test_operations_equal_the_operations_of_big_vision_on_twenty_photos(name):
    check([np.asarray(photo.resize((224, 224))) for photo in photos()], name, (10, 15))


@pytest.mark.parametrize(
    ('magnitude', 'name', 'value'),
    [
        (10, 'solarize', 155),
        (20, 'solarize', 155),
        (15, 'solarize', 100),  # thresholds 0, 0, 128
        (0, 'posterize', 0),
        (20, 'posterize', 100),
        (10, 'contrast', cut(196 + 1.9 * (100 - 196))),
    ],
)
def test_operations_differ_from_their_names_as_in_big_vision(magnitude, name, value):
    image = tf.fill([224, 224, 3], tf.constant(100, tf.uint8))
    result = operation(name, magnitude)(image, tf.constant(1.0), tf.constant([0, 0], tf.int64))
    assert np.unique(result) == [value]


def test_operations_are_drawn_equally_often():
    keys = order.augment_bits(5, tf.constant(0, tf.int64), 6000)[:, 2]

    def draws(key):
        return [
            tf.stack([draw.which, tf.cast(draw.direction, tf.int32)])
            for draw in randaugment.draws(key, 2)
        ]

    first, second = tf.function(
        lambda: tf.map_fn(draws, keys, fn_output_signature=[tf.int32] * 2), autograph=False
    )()
    for layer in (first, second):
        counts = np.bincount(layer[:, 0], minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-3
        assert abs((layer[:, 1].numpy() > 0).mean() - 0.5) < 0.03
        assert set(np.unique(layer[:, 1])) == {-1, 1}
    pairs = np.histogram2d(first[:, 0], second[:, 0], [np.arange(17)] * 2)[0]
    assert stats.chi2_contingency(pairs).pvalue > 1e-3  # the two are independent


def test_operations_are_applied_in_the_order_of_the_draws():
    names = list(randaugment.OPERATIONS)
    image = np.asarray(picture(36, 36))
    small = settings(10, num_ops=3, translate=16, cutout=7)
    run = tf.function(lambda key: randaugment.randaugment(image, key, small), autograph=False)
    applied = set()
    for key in order.augment_bits(1, tf.constant(0, tf.int64), 30)[:, 2]:
        wanted = tf.constant(image)
        for draw in randaugment.draws(key, 3):
            name = names[draw.which]
            wanted = randaugment.OPERATIONS[name](wanted, small, draw)
            applied.add(name)
        np.testing.assert_array_equal(run(key), wanted)
    assert len(applied) > 12
