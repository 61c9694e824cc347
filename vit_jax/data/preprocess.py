"""From the bytes of an image file to pixels in TensorFlow: decode, crop, resize, normalise."""

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
# Names of tf.image.resize for its kernels.
KERNELS = {'bilinear': 'triangle', 'bicubic': 'keyscubic', 'lanczos3': 'lanczos3'}


def decode_image(encoded: tf.Tensor) -> UInt8[tf.Tensor, 'height width 3']:
    """Pixels of an image file, equal to those of `images.decode`; `encoded` is a string scalar.

    Raises tf.errors.OpError if the file is of another kind, damaged or cut short.
    """
    return _decode_whole(encoded)[0]


def _decode_whole(encoded):
    """Pixels of an image file, and whether it is a JPEG of which a part can be decoded alone."""
    start = tf.strings.substr(encoded, 0, 34)
    # Of a BMP file: length, reserved, where pixels begin and of what kind, width, height, 24 bits
    # in one plane, no compression. Its pixels need no decoding, and data/cached.py writes such.
    numbers = tf.io.decode_raw(tf.strings.substr(start + bytes(34), 2, 32), tf.int32)
    plain = (
        tf.reduce_all(
            tf.gather(numbers, [0, 2, 3, 6, 7])
            == tf.stack([tf.strings.length(encoded), 54, 40, 24 << 16 | 1, 0])
        )
        & (tf.strings.substr(start, 0, 2) == b'BM')
        & _is_allowed(numbers[4:6])
    )
    image, may_be_cut = tf.cond(
        plain,
        lambda: (tf.io.decode_bmp(encoded, 3), tf.constant(False)),
        lambda: _decode_compressed(encoded, start),
    )
    return tf.ensure_shape(image, [None, None, 3]), may_be_cut


# Not inlined: in a branch that is not taken all operations would be gone through for every image.
_decode_whole_apart = tf.function(
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
    # \C is one byte: image files are not valid UTF-8. A chance match only costs time.
    words = '|'.join(images.ORIENTATION_WORDS)
    oriented = tf.strings.regex_full_match(header, rf'(?s)\C*(?:(?i){words})\C*')
    # The operation reads PNG too.
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
    """The same pixels as a slice of `decode_image`, and what to give as `intact` the next time.

    Args:
      box: from the shape of the image to begin and size of the slice, as tf.slice takes them.
      intact: whether this file is a JPEG that was decoded as a whole before. Of others a part is
        not decoded alone, which takes less time but would accept a file that is damaged below it,
        so that the crop would decide whether a file counts as broken.
    """

    def whole():
        image, may_be_cut = _decode_whole_apart(encoded)
        return tf.slice(image, *box(tf.shape(image))), may_be_cut

    def part():
        shape = tf.io.extract_jpeg_shape(encoded)
        begin, size = box(shape)
        # Colours at the border of what is decoded lack their neighbours: two columns more. From
        # where a block of 16 begins: else TensorFlow copies each row, out of memory, not the cache.
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
    """Whether TensorFlow may decode an image of that size; `images.decode` refuses others."""
    size = tf.cast(size, tf.int64)
    return (tf.reduce_prod(size) <= images.MAX_PIXELS) & tf.reduce_all(
        (size > 0) & (size <= images.MAX_SIDE)
    )


def _turn_upright(encoded, pixels):
    try:
        with Image.open(io.BytesIO(encoded), formats=images.FORMATS) as image:
            return images.turn_upright(pixels, image)
    except Exception:  # TensorFlow has read the pixels, so it is the metadata that is damaged
        return pixels


def resize(
    image: Num[tf.Tensor, 'rows columns 3'], size, preprocess: Mapping, window=None
) -> Float32[tf.Tensor, 'height width 3']:
    """The image at size (height, width), equal to that of data/resizing.py.

    An image of that size keeps its pixels. `preprocess` has the fields resize, antialias and
    uint8_resize, for which `image` is uint8. `window`, two pairs (top, left) and (height, width),
    asks for a part of the result and computes no other.
    """
    method, antialias = preprocess['resize'], preprocess['antialias']
    begin, extent = ([0, 0], size) if window is None else window
    if resizing.is_uint8_resize(preprocess):
        # Two ScaleAndTranslate with rounding between them take longer, and their pixels are up to
        # 13 grey levels from those of Pillow, which resizes the height of tall images first.
        resized = tf.numpy_function(
            functools.partial(resizing.uint8_resized, method=method),
            [image, size, begin, extent],
            tf.uint8,
            stateful=False,
        )
        return tf.cast(tf.ensure_shape(resized, [None, None, 3]), tf.float32)
    if method == 'area':  # whose operation makes no windows
        return tf.cond(
            tf.reduce_all(tf.equal(extent, size)),
            lambda: tf.raw_ops.ResizeArea(images=image[None], size=size)[0],
            lambda: tf.ensure_shape(
                tf.numpy_function(
                    functools.partial(resizing.interpolated, method=method),
                    [image, size, begin, extent],
                    tf.float32,
                    stateful=False,
                ),
                [None, None, 3],
            ),
        )
    if method == 'bilinear' and not antialias and window is None:
        # A seventh of the time of the operation below. Of bytes it takes longer, for the same bits.
        return tf.raw_ops.ResizeBilinear(
            images=tf.cast(image, tf.float32)[None], size=size, half_pixel_centers=True
        )[0]
    old_size = tf.shape(image)[:2]
    scale = tf.cast(size, tf.float32) / tf.cast(old_size, tf.float32)

    # As tf.image.resize does it, which needs a copy of the image in floats and makes no windows.
    def scaled():
        return tf.raw_ops.ScaleAndTranslate(
            images=image[None],
            size=extent,
            scale=scale,
            kernel_type=KERNELS[method],
            translation=-tf.cast(begin, tf.float32),
            antialias=antialias,
        )[0]

    return tf.cond(
        tf.reduce_all(old_size == size),
        lambda: tf.cast(
            tf.slice(image, [*tf.unstack(begin), 0], [*tf.unstack(extent), 3]), tf.float32
        ),
        scaled,
    )


def train_image(
    encoded: tf.Tensor,
    keys: Int64[tf.Tensor, '4 2'],
    image_size: tuple[int, int],
    augment: Mapping,
    preprocess: Mapping,
    intact: tf.Tensor,
) -> tuple[Float32[tf.Tensor, 'height width 3'], tf.Tensor]:
    """One training image, cropped, flipped and distorted, and what `intact` is the next time.

    The image is a function of the file and the keys. Its values are in 0..255, which 'bicubic' may
    overshoot a little unless `uint8_resize` is set.

    Args:
      keys: all bits random, one row for each use.
      augment: `config.augment`. crop='inception' takes a random area (min_area..1) and aspect ratio
        (3/4..4/3); 'pad' resizes, adds `pad` mirrored pixels on each side and crops; 'resize'
        resizes to sides of which `crop_ratio` is the crop (BiT, arXiv 1912.11370, section 3.3);
        'none' only resizes, all by the filter `resize`, that of `preprocess` if 'same'. With
        `flip`, half of the images are mirrored. `randaugment` is for randaugment.randaugment.
      preprocess: fields resize, antialias and uint8_resize of `config.preprocess`.
      intact: of `decode_part`.
    """
    target_h, target_w = image_size
    size = (target_h, target_w)
    if augment['resize'] != 'same':
        preprocess = {**preprocess, 'resize': augment['resize']}

    def box(shape):
        return tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            keys[0],
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(augment['min_area'], 1.0),
            use_image_if_no_bounding_boxes=True,
        )[:2]

    flip = augment['flip'] and keys[1, 0] < 0
    if augment['crop'] == 'inception':
        image, intact = decode_part(encoded, box, intact)
        # Before resizing, whose filters are symmetric: bytes take less time than floats.
        image = resize(flipped(image, flip), size, preprocess)
    else:
        target = (
            resizing.target_size(size, {'fit': 'squash', **augment})
            if augment['crop'] == 'resize'
            else size
        )
        image = resize(decode_image(encoded), target, preprocess)
        if augment['crop'] == 'pad':
            pad = augment['pad']
            # Mirrored at the edge: a border of one colour would tell where the crop lies.
            image = tf.pad(image, [[pad, pad], [pad, pad], [0, 0]], mode='SYMMETRIC')
        # keys[0] is two random numbers: drawing others from it would cost more than the crop.
        begin = tf.cast(keys[0] % tf.cast(tf.shape(image)[:2] - size + 1, tf.int64), tf.int32)
        image = flipped(tf.slice(image, tf.concat([begin, [0]], 0), [*size, 3]), flip)
    if augment['randaugment']['num_ops']:
        whole = tf.saturate_cast(image, tf.uint8)  # cut off, as in big_vision
        image = tf.cast(randaugment(whole, keys[2], augment['randaugment']), tf.float32)
    return tf.ensure_shape(image, [*size, 3]), intact


def flipped(image: Num[tf.Tensor, 'height width 3'], flip) -> Num[tf.Tensor, 'height width 3']:
    """The image, mirrored if `flip`, which is a bool or a tensor of one."""
    if flip is False:  # of a config
        return image
    # tf.cond would take longer. Of an image that stays as it is, a whole row is taken as one pixel.
    rows, columns = tf.unstack(tf.shape(image)[:2])
    pixel = tf.where(flip, 3, 3 * columns)
    return tf.reshape(tf.reverse(tf.reshape(image, [rows, -1, pixel]), [1]), [rows, columns, 3])


def eval_image(
    encoded: tf.Tensor, image_size: tuple[int, int], preprocess: Mapping
) -> Float32[tf.Tensor, 'height width 3']:
    """One image of evaluation, values in 0..255: resized to `resizing.fitted_size`, then cropped.

    `preprocess` has the fields fit, crop_ratio, resize, antialias and uint8_resize of a config.
    """
    image = decode_image(encoded)
    target_h, target_w = image_size
    size = (target_h, target_w)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.int64))
    new_size = tf.cast(resizing.fitted_size(height, width, size, preprocess, tf.maximum), tf.int32)
    if preprocess['fit'] == 'squash' and preprocess['crop_ratio'] == 1:
        return tf.ensure_shape(resize(image, size, preprocess), [*size, 3])
    offset = resizing.crop_offset(new_size - tf.constant(size), preprocess['fit'])
    # Ordinary images are resized as a whole, so that no bit of what was measured before changes.
    is_thin = tf.reduce_prod(tf.cast(new_size, tf.int64)) > resizing.THIN * size[0] * size[1]
    begin = tf.where(is_thin, offset, 0)
    extent = tf.where(is_thin, tf.constant(size), new_size)
    image = resize(image, new_size, preprocess, (begin, extent))
    image = tf.slice(image, [*tf.unstack(offset - begin), 0], [*size, 3])
    return tf.ensure_shape(image, [*size, 3])


def normalise(
    pixels: Float32[tf.Tensor, '... width 3'], preprocess: Mapping
) -> Float32[tf.Tensor, '... width 3']:
    """(x / 255 - mean) / std, with mean and std of `config.preprocess`, for x in 0..255."""
    mean: np.ndarray | np.float32
    std: np.ndarray | np.float32
    mean, std = (np.asarray(preprocess[name], np.float32) for name in ('mean', 'std'))
    if np.ptp(mean) or np.ptp(std):
        # A row at a time: for vectors of three numbers TensorFlow takes as long as for resizing.
        mean, std = (np.tile(values, [pixels.shape[-2], 1]) for values in (mean, std))
    else:
        mean, std = mean.flat[0], std.flat[0]  # numbers take half of the time of rows
    if np.all(np.frexp(std)[0] == 0.5):  # powers of two: the same bits by an operation less
        return pixels / (np.float32(255) * std) - mean / std
    return (pixels / 255.0 - mean) / std
