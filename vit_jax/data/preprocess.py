"""From the bytes of an image file to pixels: decode, orient, crop, resize, normalise."""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from vit_jax.data.host_tensorflow import tf

_EXIF_ORIENTATION_TAG = 0x0112
# Orientation is looked for in this many bytes; metadata stands before the pixels.
_HEADER_BYTES = 1 << 16
_MIRRORED_COLUMNS = (2, 3, 6, 7)
_MIRRORED_ROWS = (3, 4, 7, 8)
_TRANSPOSED = (5, 6, 7, 8)


def decode_image(encoded):
    """Pixels of a JPEG, PNG, GIF (first frame) or BMP file, upright as its EXIF data says.

    encoded: string scalar. Returns uint8 [height, width, 3]. Equals Pillow's decoder.
    Raises tf.errors.OpError if the file is broken, cut short or of another format.
    """
    start = tf.strings.substr(encoded, 0, 3)
    is_jpeg_or_png = (start == b'\xff\xd8\xff') | (start == b'\x89PN')
    header = tf.strings.substr(encoded, 0, _HEADER_BYTES)
    # \C is one byte: image files are not valid UTF-8. A chance hit only costs the slow way.
    oriented = tf.strings.regex_full_match(header, r'(?s)\C*(?:(?i)exif|tiff:orientation)\C*')
    image = tf.cond(
        is_jpeg_or_png & ~oriented,
        lambda: _decode_jpeg_or_png(encoded),
        lambda: tf.cond(
            is_jpeg_or_png,
            lambda: _python(_upright, encoded, _decode_jpeg_or_png(encoded)),
            lambda: _python(_decode_with_pillow, encoded),
        ),
    )
    return tf.ensure_shape(image, [None, None, 3])


def _decode_jpeg_or_png(encoded):
    # The whole file: decode_and_crop_jpeg would accept one that is cut off below the crop, so
    # that whether it counts as broken would hang on the crop. The operation reads PNG as well.
    # The default DCT differs from everybody else's decoder by a few grey levels.
    return tf.io.decode_jpeg(encoded, channels=3, dct_method='INTEGER_ACCURATE')


def _python(function, *args):
    function = tf.autograph.experimental.do_not_convert(function)
    image = tf.numpy_function(function, args, tf.uint8, stateful=False)
    return tf.ensure_shape(image, [None, None, 3])


def _decode_with_pillow(encoded):
    # TensorFlow decodes palette BMP to wrong pixels and the frames of a GIF to a fourth axis.
    try:
        image = Image.open(io.BytesIO(encoded), formats=('GIF', 'BMP'))
    except UnidentifiedImageError:
        kind = 'not a JPEG, PNG, GIF or BMP image' if encoded else 'the file is empty'
        raise ValueError(kind) from None
    with image:
        return np.asarray(image.convert('RGB'))


def _upright(encoded, pixels):
    # TensorFlow ignores EXIF orientation. Values 1..8 as in the EXIF standard: 5..8 exchange rows
    # and columns first. Unreadable metadata does not make an image unreadable.
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            orientation = image.getexif().get(_EXIF_ORIENTATION_TAG, 1)
    except Exception:
        return pixels
    if orientation in _TRANSPOSED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in _MIRRORED_ROWS:
        pixels = pixels[::-1]
    if orientation in _MIRRORED_COLUMNS:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def resize(image, size, method):
    """[h, w, 3] of any number type to float32 [*size, 3], antialiased; the same pixels if equal.

    `method` is a name that tf.image.resize knows. Equals Pillow's resize of float channels.
    """
    pixels = tf.cast(image, tf.float32)
    return tf.cond(
        tf.reduce_all(tf.shape(image)[:2] == size),
        lambda: pixels,
        lambda: tf.image.resize(image, size, method, antialias=True),
    )


def crop_for_training(image, seed, config):
    """Random crop of an image, as `config.augment.crop` says.

    image: uint8 [h, w, 3]; seed: int64 [2], all bits random. Returns float32
    [*config.image_size, 3] in 0..255 (bicubic resizing may overshoot a little). 'inception' takes
    a random area (min_area..1) and aspect ratio (3/4..4/3); 'pad' resizes, adds `pad` mirrored
    pixels on each side and crops; 'none' only resizes.
    """
    size, method = tuple(config.image_size), config.preprocess.resize
    if config.augment.crop == 'inception':
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.shape(image),
            tf.zeros([1, 0, 4]),
            seed,
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(config.augment.min_area, 1.0),
            use_image_if_no_bounding_boxes=True,
        )
        image = resize(tf.slice(image, begin, extent), size, method)
    else:
        image = resize(image, size, method)
        if config.augment.crop == 'pad':
            pad = config.augment.pad
            # Mirrored at the edge: a border of its own colour would tell where the crop lies.
            image = tf.pad(image, [[pad, pad], [pad, pad], [0, 0]], mode='SYMMETRIC')
            # The key is itself two random numbers: drawing others with it costs more than the crop.
            begin = tf.cast(seed % (2 * pad + 1), tf.int32)
            image = tf.slice(image, tf.concat([begin, [0]], 0), [*size, 3])
    return tf.ensure_shape(image, [*size, 3])


def augment(image, seeds, config):
    """One training image: crop, then flip. A function of the image and the seeds.

    image: uint8 [h, w, 3]; seeds: int64 [4, 2], all bits random, one row for each use.
    Returns float32 [*config.image_size, 3] in 0..255.
    """
    image = crop_for_training(image, seeds[0], config)
    if config.augment.flip:
        image = tf.cond(seeds[1, 0] < 0, lambda: tf.reverse(image, [1]), lambda: image)
    # RandAugment goes here, with seeds[2].
    return image


def resize_and_central_crop(image, size, preprocess):
    """Evaluation crop: resize, keeping the aspect ratio, and cut out the middle.

    image: uint8 [h, w, 3]; size: (height, width). With target = round(size / crop_ratio), the image
    shrinks or grows until it just covers the target; the other side is rounded half up. The crop
    starts at floor((side - size) / 2). Returns float32 [*size, 3] in 0..255.
    """
    target = [round(side / preprocess.crop_ratio) for side in size]
    target_h, target_w = (tf.constant(side, tf.int64) for side in target)
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.int64))
    # In integers, so that every implementation rounds alike.
    by_height = target_h * width >= target_w * height
    new_size = tf.where(
        by_height,
        tf.stack([target_h, (2 * width * target_h + height) // (2 * height)]),
        tf.stack([(2 * height * target_w + width) // (2 * width), target_w]),
    )
    new_size = tf.cast(new_size, tf.int32)
    image = resize(image, new_size, preprocess.resize)
    top, left = tf.unstack((new_size - tf.constant(size)) // 2)
    image = tf.slice(image, tf.stack([top, left, 0]), [*size, 3])
    return tf.ensure_shape(image, [*size, 3])


def normalise(images, preprocess):
    """(x / 255 - mean) / std for float32 [..., 3] in 0..255."""
    mean = tf.constant(preprocess.mean, tf.float32)
    std = tf.constant(preprocess.std, tf.float32)
    return (images / 255.0 - mean) / std


def preprocess_eval(encoded, image_size, preprocess):
    """What evaluation shows the model of one image file.

    encoded: bytes or string scalar; image_size: (height, width); preprocess: config.preprocess.
    Returns float32 [height, width, 3], normalised.
    """
    # In a graph, as in the pipeline: called eagerly, Python functions get other bytes.
    decode = tf.function(decode_image, input_signature=[tf.TensorSpec([], tf.string)])
    image = decode(tf.convert_to_tensor(encoded, tf.string))
    return normalise(resize_and_central_crop(image, tuple(image_size), preprocess), preprocess)
