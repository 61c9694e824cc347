"""From the bytes of an image file to pixels in TensorFlow: decode, crop, resize, normalise."""

import io
from collections.abc import Mapping

from jaxtyping import Float32, Int64, Num, UInt8
from PIL import Image

from vit_jax.data import images
from vit_jax.data.host_tensorflow import tf

# Names of tf.image.resize for its kernels.
KERNELS = {'bilinear': 'triangle', 'bicubic': 'keyscubic', 'lanczos3': 'lanczos3'}


def decode_image(encoded: tf.Tensor) -> UInt8[tf.Tensor, 'height width 3']:
    """Pixels of an image file, equal to those of `images.decode`; `encoded` is a string scalar.

    Raises tf.errors.OpError if the file is of another kind, damaged or cut short.
    """
    start = tf.strings.substr(encoded, 0, 24)
    fits = tf.cond(tf.strings.substr(start, 0, 3) == b'\xff\xd8\xff',
                   lambda: _is_allowed(tf.io.extract_jpeg_shape(encoded)[:2]),
                   lambda: _is_png_that_fits(start))
    header = tf.strings.substr(encoded, 0, images.HEADER_BYTES)
    # \C is one byte: image files are not valid UTF-8. A chance match only costs time.
    words = '|'.join(images.ORIENTATION_WORDS)
    oriented = tf.strings.regex_full_match(header, rf'(?s)\C*(?:(?i){words})\C*')
    # decode_and_crop_jpeg would accept a file that is cut off below the crop, so that the crop
    # would decide whether a file counts as broken. The operation reads PNG too. With the default
    # DCT, pixels differ from those of other decoders by a few grey levels.
    image = tf.cond(fits, lambda: tf.io.decode_jpeg(encoded, 3, dct_method='INTEGER_ACCURATE'),
                    lambda: tf.numpy_function(images.decode, [encoded], tf.uint8, stateful=False))
    image = tf.cond(fits & oriented, lambda: tf.numpy_function(
        _turn_upright, [encoded, image], tf.uint8, stateful=False), lambda: image)
    return tf.ensure_shape(image, [None, None, 3])


def _is_png_that_fits(start):
    padded = tf.strings.substr(start + bytes(24), 16, 8)  # a file may be shorter
    size = tf.io.decode_raw(padded, tf.int32, little_endian=False)
    return (tf.strings.substr(start, 0, 3) == b'\x89PN') & _is_allowed(size)


def _is_allowed(size):
    """Whether TensorFlow may decode an image of that size; `images.decode` refuses others."""
    size = tf.cast(size, tf.int64)
    return ((tf.reduce_prod(size) <= images.MAX_PIXELS)
            & tf.reduce_all((size > 0) & (size <= images.MAX_SIDE)))


def _turn_upright(encoded, pixels):
    try:
        with Image.open(io.BytesIO(encoded), formats=images.FORMATS) as image:
            return images.turn_upright(pixels, image)
    except Exception:  # TensorFlow has read the pixels, so it is the metadata that is damaged
        return pixels


def resize(image: Num[tf.Tensor, 'rows columns 3'], size, method: str, window=None
           ) -> Float32[tf.Tensor, 'height width 3']:
    """The image at size (height, width), antialiased like Pillow's resizing of float channels.

    An image of that size keeps its pixels. `method` is a key of KERNELS. `window`, two pairs
    (top, left) and (height, width), asks for a part of the result and computes no other.
    """
    old_size = tf.shape(image)[:2]
    begin, extent = ([0, 0], size) if window is None else window
    scale = tf.cast(size, tf.float32) / tf.cast(old_size, tf.float32)

    # As tf.image.resize does it, which needs a copy of the image in floats and makes no windows.
    def scaled():
        return tf.raw_ops.ScaleAndTranslate(
            images=image[None], size=extent, scale=scale, kernel_type=KERNELS[method],
            translation=-tf.cast(begin, tf.float32), antialias=True)[0]

    return tf.cond(tf.reduce_all(old_size == size), lambda: tf.cast(
        tf.slice(image, [*tf.unstack(begin), 0], [*tf.unstack(extent), 3]), tf.float32), scaled)


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
    offset = (new_size - tf.constant(size)) // 2
    # Ordinary images are resized as a whole, so that no bit of what was measured before changes.
    is_thin = tf.reduce_prod(tf.cast(new_size, tf.int64)) > images.THIN * size[0] * size[1]
    begin = tf.where(is_thin, offset, 0)
    extent = tf.where(is_thin, tf.constant(size), new_size)
    image = resize(image, new_size, preprocess['resize'], (begin, extent))
    image = tf.slice(image, [*tf.unstack(offset - begin), 0], [*size, 3])
    return tf.ensure_shape(image, [*size, 3])


def normalise(pixels: Float32[tf.Tensor, '... 3'], preprocess: Mapping
              ) -> Float32[tf.Tensor, '... 3']:
    """(x / 255 - mean) / std, with mean and std of `config.preprocess`, for x in 0..255."""
    mean, std = (tf.constant(preprocess[name], tf.float32) for name in ('mean', 'std'))
    return (pixels / 255.0 - mean) / std
