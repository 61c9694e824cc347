"""From the bytes of an image file to pixels in TensorFlow: decode, crop, resize, normalise."""

import io
from collections.abc import Mapping

from jaxtyping import Float32, Int64, Num, UInt8
from PIL import Image

from vit_jax.data import images
from vit_jax.data.host_tensorflow import tf


def decode_image(encoded: tf.Tensor) -> UInt8[tf.Tensor, 'height width 3']:
    """Pixels of an image file, equal to those of `images.decode`; `encoded` is a string scalar.

    Raises tf.errors.OpError if the file is of another kind, damaged or cut short.
    """
    start = tf.strings.substr(encoded, 0, 3)
    is_jpeg_or_png = (start == b'\xff\xd8\xff') | (start == b'\x89PN')
    header = tf.strings.substr(encoded, 0, images.HEADER_BYTES)
    # \C is one byte: image files are not valid UTF-8. A chance match only costs time.
    words = '|'.join(images.ORIENTATION_WORDS)
    oriented = tf.strings.regex_full_match(header, rf'(?s)\C*(?:(?i){words})\C*')
    # decode_and_crop_jpeg would accept a file that is cut off below the crop, so that the crop
    # would decide whether a file counts as broken. The operation reads PNG too. With the default
    # DCT, pixels differ from those of other decoders by a few grey levels.
    image = tf.cond(is_jpeg_or_png,
                    lambda: tf.io.decode_jpeg(encoded, 3, dct_method='INTEGER_ACCURATE'),
                    lambda: tf.numpy_function(images.decode, [encoded], tf.uint8, stateful=False))
    image = tf.cond(is_jpeg_or_png & oriented, lambda: tf.numpy_function(
        _turn_upright, [encoded, image], tf.uint8, stateful=False), lambda: image)
    return tf.ensure_shape(image, [None, None, 3])


def _turn_upright(encoded, pixels):
    try:
        with Image.open(io.BytesIO(encoded), formats=images.FORMATS) as image:
            return images.turn_upright(pixels, image)
    except Exception:  # TensorFlow has read the pixels, so it is the metadata that is damaged
        return pixels


def resize(image: Num[tf.Tensor, 'rows columns 3'], size, method: str
           ) -> Float32[tf.Tensor, 'height width 3']:
    """The image at size (height, width), antialiased like Pillow's resizing of float channels.

    An image of that size keeps its pixels. `method` is a name that tf.image.resize knows.
    """
    pixels = tf.cast(image, tf.float32)
    return tf.cond(tf.reduce_all(tf.shape(image)[:2] == size), lambda: pixels,
                   lambda: tf.image.resize(image, size, method, antialias=True))


def train_image(encoded: tf.Tensor, keys: Int64[tf.Tensor, '4 2'], image_size: tuple[int, int],
                augment: Mapping, method: str) -> Float32[tf.Tensor, 'height width 3']:
    """One training image, cropped and then flipped: a function of the file and the keys.

    Its values are in 0..255, which 'bicubic' may overshoot a little.

    Args:
      keys: all bits random, one row for each use.
      augment: `config.augment`. crop='inception' takes a random area (min_area..1) and aspect ratio
        (3/4..4/3); 'pad' resizes, adds `pad` mirrored pixels on each side and crops; 'none' only
        resizes. With `flip`, half of the images are mirrored.
    """
    image, size = decode_image(encoded), tuple(image_size)
    if augment['crop'] == 'inception':
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.shape(image), tf.zeros([1, 0, 4]), keys[0], min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3), area_range=(augment['min_area'], 1.0),
            use_image_if_no_bounding_boxes=True)
        image = resize(tf.slice(image, begin, extent), size, method)
    else:
        image = resize(image, size, method)
        if augment['crop'] == 'pad':
            pad = augment['pad']
            # Mirrored at the edge: a border of one colour would tell where the crop lies.
            image = tf.pad(image, [[pad, pad], [pad, pad], [0, 0]], mode='SYMMETRIC')
            # keys[0] is two random numbers: drawing others from it would cost more than the crop.
            begin = tf.cast(keys[0] % (2 * pad + 1), tf.int32)
            image = tf.slice(image, tf.concat([begin, [0]], 0), [*size, 3])
    if augment['flip']:
        image = tf.cond(keys[1, 0] < 0, lambda: tf.reverse(image, [1]), lambda: image)
    # RandAugment goes here, with keys[2].
    return tf.ensure_shape(image, [*size, 3])


def eval_image(encoded: tf.Tensor, image_size: tuple[int, int], preprocess: Mapping
               ) -> Float32[tf.Tensor, 'height width 3']:
    """One image of evaluation, values in 0..255: resized to `images.covering_size`, then cropped.

    The crop starts at floor((side - size) / 2).
    """
    image, size = decode_image(encoded), tuple(image_size)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.int64))
    new_size = tf.cast(images.covering_size(height, width, size, preprocess['crop_ratio'],
                                            tf.maximum), tf.int32)
    image = resize(image, new_size, preprocess['resize'])
    top, left = tf.unstack((new_size - tf.constant(size)) // 2)
    image = tf.slice(image, tf.stack([top, left, 0]), [*size, 3])
    return tf.ensure_shape(image, [*size, 3])


def normalise(pixels: Float32[tf.Tensor, '... 3'], preprocess: Mapping
              ) -> Float32[tf.Tensor, '... 3']:
    """(x / 255 - mean) / std, with mean and std of `config.preprocess`, for x in 0..255."""
    mean, std = (tf.constant(preprocess[name], tf.float32) for name in ('mean', 'std'))
    return (pixels / 255.0 - mean) / std
