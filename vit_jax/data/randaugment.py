"""RandAugment (arXiv 1909.13719) with the operations that AugReg and big_vision train with.

As in big_vision's pp/archive/autoaugment.py, an image is uint8 between operations, and each
operation cuts off fractions. Some operations of that file do not do what their names say. Models
were trained with them, so the operations here do the same:

- solarize has a threshold of 8 bits: 0 at the magnitudes 0, 10 and 20, which invert the image;
- contrast moves pixels away from a number that depends only on the size of the image (196 at
  224 px), and not on its brightness;
- posterize keeps one bit at magnitude 0, and all eight at 20;
- brightness, colour, contrast and sharpness only increase from magnitude 5 on.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxtyping import Int64, UInt8

from vit_jax.data.host_tensorflow import tf

GREY = 128  # the colour outside the image, and of the square of `cutout`
_SMOOTH = [[1, 1, 1], [1, 5, 1], [1, 1, 1]]


class Draw(NamedTuple):
    """The random numbers of one operation.

    Attributes:
      which: position in OPERATIONS, int32.
      direction: -1.0 or 1.0.
      centre: two whole numbers, at least 0.
    """

    which: tf.Tensor
    direction: tf.Tensor
    centre: tf.Tensor


def randaugment(
    image: UInt8[tf.Tensor, 'height width 3'], key: Int64[tf.Tensor, ' 2'], settings: Mapping
) -> UInt8[tf.Tensor, 'height width 3']:
    """The image after `num_ops` operations, each drawn uniformly from OPERATIONS.

    Args:
      key: random bits. The result is a function of the key and the image.
      settings: `config.augment.randaugment`.
    """
    for draw in draws(key, settings['num_ops']):
        # Arguments are bound here: branches are traced after `image` and `draw` have changed.
        image = tf.switch_case(
            draw.which,
            [
                functools.partial(operation, image, settings, draw)
                for operation in OPERATIONS.values()
            ],
        )
        image = tf.ensure_shape(image, [None, None, 3])
    return image


def draws(key: Int64[tf.Tensor, ' 2'], num_ops: int) -> list[Draw]:
    """The random numbers for a sequence of operations."""
    bits = tf.cast(
        tf.random.stateless_uniform([num_ops, 4], key, minval=None, maxval=None, dtype=tf.uint32),
        tf.int64,
    )
    return [
        Draw(
            which=tf.cast(row[0] % len(OPERATIONS), tf.int32),
            direction=tf.cast(2 * (row[1] % 2) - 1, tf.float32),
            centre=row[2:],
        )
        for row in tf.unstack(bits)
    ]


def auto_contrast(image, settings, draw):
    """Stretches the range of each colour to 0..255."""
    pixels = tf.cast(image, tf.float32)
    low = tf.reduce_min(pixels, [0, 1])
    high = tf.reduce_max(pixels, [0, 1])
    scale = 255.0 / (high - low)
    shift = -low * scale
    has_range = high > low  # a channel with a single value stays as it is
    scale = tf.where(has_range, scale, 1.0)
    shift = tf.where(has_range, shift, 0.0)
    return tf.saturate_cast(pixels * scale + shift, tf.uint8)


def equalize(image, settings, draw):
    """Makes the histogram of each colour as even as possible."""

    def channel(pixels):
        counts = tf.math.bincount(pixels, minlength=256, maxlength=256)
        step = (tf.size(pixels) - counts[tf.reduce_max(pixels)]) // 255
        table = (tf.cumsum(counts, exclusive=True) + step // 2) // tf.maximum(step, 1)
        return tf.where(step > 0, tf.gather(tf.minimum(table, 255), pixels), pixels)

    channels = tf.unstack(tf.cast(image, tf.int32), num=3, axis=-1)
    return tf.cast(tf.stack([channel(pixels) for pixels in channels], -1), tf.uint8)


def invert(image, settings, draw):
    """Returns 255 - x."""
    return 255 - image


def rotate(image, settings, draw):
    """Rotates by 30 degrees at magnitude 10, in either direction, around the middle."""
    angle = draw.direction * (30 * _strength(settings)) * (math.pi / 180)
    cos = tf.cos(angle)
    sin = tf.sin(angle)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2] - 1, tf.float32))
    return _moved(
        image,
        [
            cos,
            -sin,
            (width - (cos * width - sin * height)) / 2,
            sin,
            cos,
            (height - (sin * width + cos * height)) / 2,
        ],
    )


def posterize(image, settings, draw):
    """Keeps only the upper bits of each colour: 4 at magnitude 10."""
    # TensorFlow treats a shift by 8 as a shift by 7, and so does the source.
    shift = min(8 - int(4 * _strength(settings)), 7)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, shift), shift)


def solarize(image, settings, draw):
    """Inverts values from a threshold on. It is 256 at magnitude 10, which is 0 in 8 bits."""
    return tf.where(image < int(256 * _strength(settings)) % 256, image, 255 - image)


def solarize_add(image, settings, draw):
    """Adds 110 at magnitude 10 to x below 128; the sum is at most 255."""
    brighter = tf.cast(image, tf.int32) + int(110 * _strength(settings))
    return tf.where(image < 128, tf.saturate_cast(brighter, tf.uint8), image)


def color(image, settings, draw):
    """Blends the image with its grey version: away from it or towards it, by the magnitude."""
    return _blend(tf.image.grayscale_to_rgb(tf.image.rgb_to_grayscale(image)), image, settings)


def contrast(image, settings, draw):
    """Blends the image with a constant, the number of pixels / 256 (at most 255)."""
    mean = tf.minimum(tf.size(image) // 3 // 256, 255)
    return _blend(tf.fill(tf.shape(image), tf.cast(mean, tf.uint8)), image, settings)


def brightness(image, settings, draw):
    """Blends the image with black: away from it or towards it, by the magnitude."""
    return _blend(tf.zeros_like(image), image, settings)


def sharpness(image, settings, draw):
    """Blends the image, except its border, with its smoothed version."""
    kernel = tf.tile(tf.constant(_SMOOTH, tf.float32)[..., None, None], [1, 1, 3, 1])
    total = tf.nn.depthwise_conv2d(tf.cast(image, tf.float32)[None], kernel, [1, 1, 1, 1], 'VALID')
    # Integer division. The source divides in float32, where some quotients are a little too small.
    smooth = tf.cast(tf.cast(total[0], tf.int32) // 13, tf.uint8)
    border = [[1, 1], [1, 1], [0, 0]]
    inside = tf.pad(tf.ones_like(smooth), border) == 1
    return _blend(tf.where(inside, tf.pad(smooth, border), image), image, settings)


def shear_x(image, settings, draw):
    """Shears by 0.3 pixels per row at magnitude 10, in either direction."""
    return _moved(image, [1.0, draw.direction * (0.3 * _strength(settings)), 0.0, 0.0, 1.0, 0.0])


def shear_y(image, settings, draw):
    """Shears by 0.3 pixels per column at magnitude 10, in either direction."""
    return _moved(image, [1.0, 0.0, 0.0, draw.direction * (0.3 * _strength(settings)), 1.0, 0.0])


def translate_x(image, settings, draw):
    """Moves by `translate` pixels at magnitude 10, left or right."""
    return _moved(image, [1.0, 0.0, draw.direction * _distance(settings), 0.0, 1.0, 0.0])


def translate_y(image, settings, draw):
    """Moves by `translate` pixels at magnitude 10, up or down."""
    return _moved(image, [1.0, 0.0, 0.0, 0.0, 1.0, draw.direction * _distance(settings)])


def cutout(image, settings, draw):
    """Paints a grey square, `cutout` pixels to each side of its centre at magnitude 10."""
    reach = int(settings['cutout'] * _strength(settings))

    def is_near(side, number):
        """Whether each place along a side of the image belongs to the square."""
        centre = number % side
        places = tf.range(side)
        return (places >= centre - reach) & (places < centre + reach)

    height, width = tf.unstack(tf.shape(image, tf.int64)[:2])
    row_number, column_number = tf.unstack(draw.centre)
    inside = is_near(height, row_number)[:, None] & is_near(width, column_number)
    outside = tf.cast(~inside, tf.uint8)[..., None]
    return image * outside + GREY * (1 - outside)


# Functions (image, settings, draw) -> image; both images are uint8 [height, width, 3].
OPERATIONS: dict[str, Callable] = {
    operation.__name__: operation
    for operation in (
        auto_contrast,
        equalize,
        invert,
        rotate,
        posterize,
        solarize,
        color,
        contrast,
        brightness,
        sharpness,
        shear_x,
        shear_y,
        translate_x,
        translate_y,
        cutout,
        solarize_add,
    )
}


def _strength(settings) -> float:
    return settings['magnitude'] / 10


def _distance(settings) -> float:
    return settings['translate'] * _strength(settings)


def _blend(start, end, settings):
    """Blends from `start` towards `end`, and beyond `end` if the factor is above 1."""
    factor = _strength(settings) * 1.8 + 0.1
    start = tf.cast(start, tf.float32)
    end = tf.cast(end, tf.float32)
    return tf.saturate_cast(start + factor * (end - start), tf.uint8)


def _moved(image, matrix):
    """An image whose pixel (x, y) is the pixel of the old image nearest to matrix @ (x, y, 1).

    `matrix` is a flat list of its two rows of three numbers.
    """
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=tf.stack([*matrix, 0.0, 0.0])[None],
        output_shape=tf.shape(image)[:2],
        fill_value=float(GREY),
        interpolation='NEAREST',
    )[0]
