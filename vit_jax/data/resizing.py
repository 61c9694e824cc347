"""How an image is brought to the size that a model takes, in NumPy: geometry and filters.

`preprocess.fit` says which chain: 'cover' and 'squash' are those of Google's code bases (big_vision
and vision_transformer), 'torchvision' is timm's, 'transformers' Hugging Face's. Those that keep the
shape of an image differ in how they round, by a pixel.

`preprocess.uint8_resize` says how numbers are rounded on the way. timm, torchvision and
transformers give the image to Pillow, which resizes one side after the other and rounds each result
to a whole number from 0 to 255: there, what a bicubic filter overshoots is cut off. TensorFlow
computes with fractions and cuts off nothing.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import PIL
from jaxtyping import Float, Num, UInt8
from PIL import Image

RESAMPLING = {
    'bilinear': Image.Resampling.BILINEAR,
    'bicubic': Image.Resampling.BICUBIC,
    'lanczos3': Image.Resampling.LANCZOS,
}

# What is antialiased is resized as a whole, unless that takes this many times the pixels of the
# crop.
THIN = 32
# From this version on, Pillow resizes the height of a tall image first.
_RESIZES_TALL_IMAGES_DOWNWARDS_FIRST = int(PIL.__version__.split('.')[0]) >= 13


def target_size(image_size: tuple[int, int], preprocess: Mapping) -> tuple[int, int]:
    """The (height, width) of which the middle is cropped, where an image has just that shape."""
    # The ratio of two whole numbers may come out a little too small.
    rounded = round if preprocess['fit'] == 'cover' else lambda x: math.floor(x + 1e-6)
    height, width = (rounded(side / preprocess['crop_ratio']) for side in image_size)
    return height, width


def fitted_size(height, width, image_size: tuple[int, int], preprocess: Mapping, larger=max):
    """The (height, width) to which evaluation resizes an image before it crops the middle.

    A squashed image gets image_size / crop_ratio. Others keep their aspect ratio and just cover it.
    Computed in integers, so that Python and TensorFlow, whose `larger` is tf.maximum, agree.
    """
    fit = preprocess['fit']
    target_h, target_w = target_size(image_size, preprocess)
    if fit == 'squash':
        return target_h, target_w
    half_h, half_w = (height, width) if fit == 'cover' else (0, 0)  # rounds to the nearest, or down
    return (
        larger((2 * height * target_w + half_w) // (2 * width), target_h),
        larger((2 * width * target_h + half_h) // (2 * height), target_w),
    )


def crop_offset(difference, fit: str):
    """Where the middle begins in a side that is longer by `difference`, an integer or a tensor."""
    # torchvision, which squashes for timm too, rounds half a pixel to even numbers, others down.
    return (difference + (difference // 2 % 2 if fit in ('torchvision', 'squash') else 0)) // 2


def resize_and_central_crop(
    image: Num[np.ndarray, 'rows columns 3'], size: tuple[int, int], preprocess: Mapping
) -> Float[np.ndarray, 'height width 3']:
    """Like `data.preprocess.eval_image`; float32 in 0..255.

    Args:
      image: of values in 0..255; uint8 for `uint8_resize`.
      size: (height, width) of the result.
      preprocess: fields fit, crop_ratio, resize, antialias and uint8_resize of `config.preprocess`.
    """
    rows, columns = image.shape[:2]
    new_size = fitted_size(rows, columns, size, preprocess)
    top, left = (
        crop_offset(new - side, preprocess['fit']) for new, side in zip(new_size, size, strict=True)
    )
    if new_size == (rows, columns):
        return image[top : top + size[0], left : left + size[1]].astype(np.float32)
    method = preprocess['resize']
    if is_uint8_resize(preprocess):
        return uint8_resized(image, new_size, (top, left), size, method).astype(np.float32)
    resized = _antialiased if preprocess['antialias'] and method != 'area' else interpolated
    return resized(image, new_size, (top, left), size, method)


def is_uint8_resize(preprocess: Mapping) -> bool:
    """The field `uint8_resize`, which records of earlier versions do not have."""
    return preprocess.get('uint8_resize', False)


def uint8_resized(
    image: UInt8[np.ndarray, 'rows columns 3'],
    new_size: Sequence[int],
    begin: Sequence[int],
    size: Sequence[int],
    method: str,
) -> UInt8[np.ndarray, 'height width 3']:
    """The part from `begin` on of the image at new_size, as Pillow itself resizes it.

    The order of the two passes, which tall images show where a filter overshoots, is that of the
    installed Pillow: version 13 has another one than version 12.
    """
    top, left = (int(x) for x in begin)
    height, width = (int(x) for x in size)
    new_height, new_width = (int(x) for x in new_size)
    resampling = RESAMPLING[method]
    whole = Image.fromarray(image)
    if new_height * new_width <= THIN * height * width:
        resized = whole.resize((new_width, new_height), resampling)
        return np.asarray(resized.crop((left, top, left + width, top + height)))
    # Only the part, one side after the other, in the order in which the whole would be resized.
    x, y = whole.width / new_width, whole.height / new_height
    sides = [
        lambda part: part.resize(
            (width, part.height), resampling, (left * x, 0, (left + width) * x, part.height)
        ),
        lambda part: part.resize(
            (part.width, height), resampling, (0, top * y, part.width, (top + height) * y)
        ),
    ]
    if is_height_first(image.shape[:2], (new_height, new_width)):
        sides.reverse()
    for resize_side in sides:
        whole = resize_side(whole)
    return np.asarray(whole)


def is_height_first(old_size: Sequence[int], new_size: Sequence[int]) -> bool:
    """Whether Pillow resizes the height of an image first; sizes are (height, width)."""
    rows = old_size[0] - new_size[0]
    columns = old_size[1] - new_size[1]
    return _RESIZES_TALL_IMAGES_DOWNWARDS_FIRST and rows > 0 and rows > 2 * columns


def _antialiased(image, new_size, begin, size, method):
    """That part of the image at new_size; pixels are weighted over the area of the new ones."""
    (top, left), (height, width) = begin, size
    window, box = (left, top, left + width, top + height), None  # of the whole image
    if new_size[0] * new_size[1] > THIN * height * width:
        y, x = (old / new for old, new in zip(image.shape, new_size, strict=False))
        box = (window[0] * x, window[1] * y, window[2] * x, window[3] * y)
        new_size, window = size, (0, 0, width, height)
    # Channel by channel, because Pillow has no colours in floats, and to take less memory.
    channels = [
        Image.fromarray(channel.astype(np.float32)).resize(new_size[::-1], RESAMPLING[method], box)
        for channel in np.moveaxis(image, -1, 0)
    ]
    return np.stack([np.asarray(channel.crop(window)) for channel in channels], axis=-1)


def interpolated(
    image: Num[np.ndarray, 'rows columns 3'],
    new_size: Sequence[int],
    begin: Sequence[int],
    size: Sequence[int],
    method: str,
) -> Float[np.ndarray, 'height width 3']:
    """The part from `begin` on of the image at new_size, from the nearest pixels alone.

    That is what tf.image.resize does by default. By 'area' a pixel is the mean over its area.
    """
    # First the axis that leaves less: an image may be a thousand times as wide as high.
    for axis in sorted((0, 1), key=lambda axis: size[axis] / image.shape[axis]):
        places, weights = _taps(image.shape[axis], new_size[axis], begin[axis], size[axis], method)
        taken = np.take(image, places, axis).astype(np.float32)  # places: [new, taps]
        image = np.einsum('nt...,nt->n...' if axis == 0 else 'rnt...,nt->rn...', taken, weights)
    return image


def _taps(old, new, begin, count, method):
    """Pixels that each of `count` new ones from `begin` on is made of, and their weights."""
    if method == 'area':
        edges = ((begin + np.arange(count + 1)) * (old / new))[:, None]
        places = np.floor(edges[:-1]).astype(int) + np.arange(math.ceil(old / new) + 1)
        weights = np.minimum(edges[1:], places + 1) - np.maximum(edges[:-1], places)
        weights = np.where(places < old, np.maximum(weights, 0), 0)
    else:
        radius, kernel = _KERNELS[method]
        centres = (begin + np.arange(count) + 0.5) * (old / new) - 0.5
        places = np.floor(centres).astype(int)[:, None] + np.arange(1 - radius, radius + 1)
        weights = np.where((places >= 0) & (places < old), kernel(centres[:, None] - places), 0)
    weights /= weights.sum(1, keepdims=True)
    return np.clip(places, 0, old - 1), weights.astype(np.float32)


def _bicubic(x):
    """Keys, Cubic convolution interpolation, 1981, with a = -1/2."""
    x = np.abs(x)
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2)


_KERNELS = {
    'bilinear': (1, lambda x: 1 - np.abs(x)),
    'bicubic': (2, _bicubic),
    'lanczos3': (3, lambda x: np.sinc(x) * np.sinc(x / 3)),
}
