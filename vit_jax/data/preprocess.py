"""From the bytes of an image file to the input of a model: decode, crop, resize, normalise."""

import functools
import io
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float32, Int64, Num, UInt8
from PIL import Image

from vit_jax.data import images, resizing
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.randaugment import randaugment

_DCT = 'INTEGER_ACCURATE'  # TensorFlow's default differs from other decoders by some grey levels
# Filters of `preprocess.resize`, and their names in ScaleAndTranslate.
KERNELS = {'bilinear': 'triangle', 'bicubic': 'keyscubic', 'lanczos3': 'lanczos3'}


def decode_image(encoded: tf.Tensor) -> UInt8[tf.Tensor, 'height width 3']:
    """The pixels of an image file, equal to `images.decode`; `encoded` is a string scalar.

    Raises:
      tf.errors.OpError: if the format is not supported, or the file is damaged or cut short.
    """
    return _decode_whole(encoded)[0]


def _decode_whole(encoded):
    """The pixels of an image file, and whether parts can be decoded alone, as in some JPEGs."""
    start = tf.strings.substr(encoded, 0, 34)
    image, is_cuttable = tf.cond(
        _is_plain_bmp(encoded, start),
        lambda: (tf.io.decode_bmp(encoded, 3), tf.constant(False)),
        lambda: _decode_compressed(encoded, start),
    )
    return tf.ensure_shape(image, [None, None, 3]), is_cuttable


def _is_plain_bmp(encoded, start):
    """Whether a file is an uncompressed BMP, as data/cached.py writes them.

    The pixels of such a file need no decoding. `start` has the first 34 bytes of the file.
    """
    # Length, reserved, offset of the pixels, length of the second header, width, height, 24 bits in
    # one plane, no compression.
    numbers = tf.io.decode_raw(tf.strings.substr(start + bytes(34), 2, 32), tf.int32)
    expected = tf.stack([tf.strings.length(encoded), 54, 40, 24 << 16 | 1, 0])
    return (
        tf.reduce_all(tf.gather(numbers, [0, 2, 3, 6, 7]) == expected)
        & (tf.strings.substr(start, 0, 2) == b'BM')
        & _is_allowed(numbers[4:6])
    )


# Not inlined: inside a branch, TensorFlow would visit all operations for every image, even when it
# does not run the branch.
_decode_whole_not_inlined = tf.function(
    _decode_whole,
    [tf.TensorSpec([], tf.string)],
    autograph=False,
    experimental_attributes={'_noinline': True},
)


def _decode_compressed(encoded, start):
    is_jpeg = tf.strings.substr(start, 0, 3) == b'\xff\xd8\xff'
    fits = tf.cond(
        is_jpeg,
        lambda: _is_allowed(tf.io.extract_jpeg_shape(encoded)[:2]),
        lambda: _is_png_that_fits(start),
    )
    header = tf.strings.substr(encoded, 0, images.HEADER_BYTES)
    # \C is one byte: image files are not valid UTF-8. An accidental match only costs time.
    words = '|'.join(images.ORIENTATION_WORDS)
    oriented = tf.strings.regex_full_match(header, rf'(?s)\C*(?:(?i){words})\C*')
    # decode_jpeg also reads PNG.
    image = tf.cond(
        fits,
        lambda: tf.io.decode_jpeg(encoded, 3, dct_method=_DCT),
        lambda: tf.numpy_function(images.decode, [encoded], tf.uint8, stateful=False),
    )
    image = tf.cond(
        fits & oriented,
        lambda: tf.numpy_function(_turn_upright, [encoded, image], tf.uint8, stateful=False),
        lambda: image,
    )
    return image, is_jpeg & fits & ~oriented


def decode_part(
    encoded: tf.Tensor, box: Callable, intact: tf.Tensor
) -> tuple[UInt8[tf.Tensor, 'height width 3'], tf.Tensor]:
    """A slice of the pixels of `decode_image`.

    Decoding only a part of a JPEG is faster, but accepts a file that is damaged below this part.
    The crop would then decide whether a file counts as broken. A file is therefore decoded as a
    whole the first time.

    Args:
      box: maps the shape of the image to the arguments `begin` and `size` of tf.slice.
      intact: whether this file is a JPEG that was decoded as a whole before.

    Returns:
      The slice, and the value of `intact` for the next time.
    """

    def whole():
        image, is_cuttable = _decode_whole_not_inlined(encoded)
        return tf.slice(image, *box(tf.shape(image))), is_cuttable

    def part():
        shape = tf.io.extract_jpeg_shape(encoded)
        begin, size = box(shape)
        # Colours at the border of a part depend on their neighbours, so two more columns are
        # decoded. The part begins at a block of 16 columns: otherwise TensorFlow copies each row,
        # from memory instead of the cache.
        first = tf.maximum(tf.bitwise.bitwise_and(begin - [0, 2, 0], [-1, -16, -1]), 0)
        last = tf.minimum(begin + size + [0, 2, 0], shape)
        window = tf.gather(tf.concat([first, last - first], 0), [0, 1, 3, 4])
        image = tf.io.decode_and_crop_jpeg(encoded, window, 3, dct_method=_DCT)
        return tf.slice(image, begin - first, size), tf.constant(True)

    image, intact = tf.cond(intact, part, whole)
    return tf.ensure_shape(image, [None, None, 3]), intact


def _is_png_that_fits(start):
    padded = tf.strings.substr(start + bytes(24), 16, 8)  # a file may be shorter
    size = tf.io.decode_raw(padded, tf.int32, little_endian=False)
    return (tf.strings.substr(start, 0, 3) == b'\x89PN') & _is_allowed(size)


def _is_allowed(size):
    """Whether TensorFlow may decode an image of this size; `images.decode` refuses all others."""
    size = tf.cast(size, tf.int64)
    return (tf.reduce_prod(size) <= images.MAX_PIXELS) & tf.reduce_all(
        (size > 0) & (size <= images.MAX_SIDE)
    )


def _turn_upright(encoded, pixels):
    try:
        with Image.open(io.BytesIO(encoded), formats=images.FORMATS) as image:
            return images.turn_upright(pixels, image)
    except Exception:  # TensorFlow has read the pixels, so the metadata must be damaged
        return pixels


def resize(
    image: Num[tf.Tensor, 'rows columns 3'], size, preprocess: Mapping, window=None
) -> Float32[tf.Tensor, 'height width 3']:
    """The image resized to (height, width), with the same pixels as data/resizing.py.

    An image that has this size already keeps its pixels.

    Args:
      image: uint8 if `uint8_resize` is set.
      preprocess: the fields resize, antialias and uint8_resize.
      window: two pairs (top, left) and (height, width). Only this part of the result is computed
        and returned.
    """
    method = preprocess['resize']
    antialias = preprocess['antialias']
    if window is None:
        begin = [0, 0]
        extent = size
    else:
        begin, extent = window
    if resizing.is_uint8_resize(preprocess):
        # Two ScaleAndTranslate with rounding between them would take longer, and their pixels would
        # differ by up to 13 grey levels from Pillow, which resizes the height of tall images first.
        resized = _resized_by_numpy(
            resizing.uint8_resized, method, image, size, begin, extent, tf.uint8
        )
        return tf.cast(resized, tf.float32)
    if method == 'area':  # ResizeArea cannot compute windows
        return tf.cond(
            tf.reduce_all(tf.equal(extent, size)),
            lambda: tf.raw_ops.ResizeArea(images=image[None], size=size)[0],
            lambda: _resized_by_numpy(
                resizing.interpolated, method, image, size, begin, extent, tf.float32
            ),
        )
    if method == 'bilinear' and not antialias and window is None:
        # This takes a seventh of the time of ScaleAndTranslate. Without the cast it would take
        # longer, for the same bits.
        return tf.raw_ops.ResizeBilinear(
            images=tf.cast(image, tf.float32)[None], size=size, half_pixel_centers=True
        )[0]
    old_size = tf.shape(image)[:2]
    scale = tf.cast(size, tf.float32) / tf.cast(old_size, tf.float32)

    def unscaled():
        part = tf.slice(image, [*tf.unstack(begin), 0], [*tf.unstack(extent), 3])
        return tf.cast(part, tf.float32)

    def scaled():
        # tf.image.resize uses the same operation, but needs a copy of the image in floats and
        # cannot compute windows.
        return tf.raw_ops.ScaleAndTranslate(
            images=image[None],
            size=extent,
            scale=scale,
            kernel_type=KERNELS[method],
            translation=-tf.cast(begin, tf.float32),
            antialias=antialias,
        )[0]

    return tf.cond(tf.reduce_all(old_size == size), unscaled, scaled)


def _resized_by_numpy(function, method, image, size, begin, extent, dtype):
    """A window of the resized image, computed by a function of data/resizing.py."""
    resized = tf.numpy_function(
        functools.partial(function, method=method),
        [image, size, begin, extent],
        dtype,
        stateful=False,
    )
    return tf.ensure_shape(resized, [None, None, 3])


def train_image(
    encoded: tf.Tensor,
    keys: Int64[tf.Tensor, '4 2'],
    image_size: tuple[int, int],
    augment: Mapping,
    preprocess: Mapping,
    intact: tf.Tensor,
) -> tuple[Float32[tf.Tensor, 'height width 3'], tf.Tensor]:
    """One training image, cropped, flipped and distorted, as a function of the file and the keys.

    With `augment.flip`, half of the images are mirrored. The values of `augment.crop` are:

    - 'inception': a box with a random area (min_area..1) and aspect ratio (3/4..4/3), resized;
    - 'pad': the resized image with `pad` mirrored pixels on each side, cropped;
    - 'resize': the image resized to image_size / crop_ratio, cropped (BiT, arXiv 1912.11370,
      section 3.3);
    - 'none': the resized image.

    Args:
      keys: random bits, one row for each use.
      image_size: (height, width) of the result.
      augment: `config.augment`. Its filter `resize` may be 'same', for the filter of `preprocess`.
      preprocess: the fields resize, antialias and uint8_resize of `config.preprocess`.
      intact: see `decode_part`.

    Returns:
      The image, and the value of `intact` for the next time. Values are in 0..255. 'bicubic' may
      overshoot this range a little unless `uint8_resize` is set.
    """
    target_h, target_w = image_size
    size = (target_h, target_w)
    if augment['resize'] != 'same':
        preprocess = {**preprocess, 'resize': augment['resize']}
    flip = False
    if augment['flip']:
        flip = keys[1, 0] < 0
    if augment['crop'] == 'inception':
        image, intact = decode_part(encoded, _inception_box(keys[0], augment), intact)
        # Flipped before resizing: the filters are symmetric, and bytes take less time than floats.
        image = resize(flipped(image, flip), size, preprocess)
    else:
        image = _random_crop(_resized_for_crop(encoded, size, augment, preprocess), size, keys[0])
        image = flipped(image, flip)
    if augment['randaugment']['num_ops']:
        whole = tf.saturate_cast(image, tf.uint8)  # fractions are cut off, as in big_vision
        image = tf.cast(randaugment(whole, keys[2], augment['randaugment']), tf.float32)
    return tf.ensure_shape(image, [*size, 3]), intact


def _inception_box(key, augment):
    """Returns a function from the shape of an image to `begin` and `size` of a random box."""

    def box(shape):
        return tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            key,
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(augment['min_area'], 1.0),
            use_image_if_no_bounding_boxes=True,
        )[:2]

    return box


def _resized_for_crop(encoded, size, augment, preprocess):
    """The image resized for the crops 'pad', 'resize' and 'none', before it is cropped."""
    if augment['crop'] == 'resize':
        target = resizing.target_size(size, {'fit': 'squash', **augment})
    else:
        target = size
    image = resize(decode_image(encoded), target, preprocess)
    if augment['crop'] == 'pad':
        pad = augment['pad']
        # The padding mirrors the image, because a border of one colour would reveal the crop.
        image = tf.pad(image, [[pad, pad], [pad, pad], [0, 0]], mode='SYMMETRIC')
    return image


def _random_crop(image, size, key):
    # The key consists of two random numbers. Drawing others from it would cost more than the crop.
    begin = tf.cast(key % tf.cast(tf.shape(image)[:2] - size + 1, tf.int64), tf.int32)
    return tf.slice(image, tf.concat([begin, [0]], 0), [*size, 3])


def flipped(image: Num[tf.Tensor, 'height width 3'], flip) -> Num[tf.Tensor, 'height width 3']:
    """The image, mirrored if `flip`, a bool or a scalar bool tensor."""
    if flip is False:
        return image
    # tf.cond would take longer. An image that is not mirrored is reversed as rows of one "pixel",
    # which leaves it as it is.
    rows, columns = tf.unstack(tf.shape(image)[:2])
    pixel = tf.where(flip, 3, 3 * columns)
    return tf.reshape(tf.reverse(tf.reshape(image, [rows, -1, pixel]), [1]), [rows, columns, 3])


def eval_image(
    encoded: tf.Tensor, image_size: tuple[int, int], preprocess: Mapping
) -> Float32[tf.Tensor, 'height width 3']:
    """One image for evaluation, resized to `resizing.fitted_size`, then cropped; values in 0..255.

    `preprocess` has the fields fit, crop_ratio, resize, antialias and uint8_resize of
    `config.preprocess`.
    """
    image = decode_image(encoded)
    target_h, target_w = image_size
    size = (target_h, target_w)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.int64))
    new_size = tf.cast(resizing.fitted_size(height, width, size, preprocess, tf.maximum), tf.int32)
    if preprocess['fit'] == 'squash' and preprocess['crop_ratio'] == 1:
        return tf.ensure_shape(resize(image, size, preprocess), [*size, 3])
    offset = resizing.crop_offset(new_size - tf.constant(size), preprocess['fit'])
    # Ordinary images are resized as a whole, so that earlier measurements stay valid bit by bit.
    is_thin = tf.reduce_prod(tf.cast(new_size, tf.int64)) > resizing.THIN * size[0] * size[1]
    begin = tf.where(is_thin, offset, 0)
    extent = tf.where(is_thin, tf.constant(size), new_size)
    image = resize(image, new_size, preprocess, (begin, extent))
    image = tf.slice(image, [*tf.unstack(offset - begin), 0], [*size, 3])
    return tf.ensure_shape(image, [*size, 3])


def normalise(
    pixels: Float32[tf.Tensor, '... width 3'], preprocess: Mapping
) -> Float32[tf.Tensor, '... width 3']:
    """Returns (x / 255 - mean) / std for x in 0..255, with mean and std of `config.preprocess`."""
    mean: np.ndarray | np.float32 = np.asarray(preprocess['mean'], np.float32)
    std: np.ndarray | np.float32 = np.asarray(preprocess['std'], np.float32)
    if np.ptp(mean) or np.ptp(std):
        # Mean and std are whole rows: with vectors of three numbers this takes as long as resizing.
        width = pixels.shape[-2]
        mean = np.tile(mean, [width, 1])
        std = np.tile(std, [width, 1])
    else:  # single numbers take half the time of rows
        mean = mean.flat[0]
        std = std.flat[0]
    if np.all(np.frexp(std)[0] == 0.5):  # powers of two: one operation fewer, the same bits
        return pixels / (np.float32(255) * std) - mean / std
    return (pixels / 255.0 - mean) / std
