"""Resizing and cropping an image to the input size of a model, in NumPy: geometry and filters.

`preprocess.fit` selects the geometry: 'cover' (big_vision), 'squash' (vision_transformer),
'torchvision' (timm) or 'transformers' (Hugging Face). All except 'squash' keep the aspect ratio of
an image. They differ by a pixel, because they round differently.

`preprocess.uint8_resize` selects the rounding. timm, torchvision and transformers resize with
Pillow, one side after the other, and Pillow rounds each result to a whole number from 0 to 255.
This cuts off the overshoot of a bicubic filter. TensorFlow computes with fractions and cuts off
nothing.
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

# An image is resized as a whole before it is cropped, unless the whole has more than this many
# times the pixels of the crop.
THIN = 32
# From version 13 on, Pillow resizes the height of a tall image first.
RESIZES_TALL_IMAGES_DOWNWARDS_FIRST = int(PIL.__version__.split('.')[0]) >= 13


def target_size(image_size: tuple[int, int], preprocess: Mapping) -> tuple[int, int]:
    """The (height, width) before the central crop of an image with this aspect ratio."""

    def rounded(x):
        if preprocess['fit'] == 'cover':
            return round(x)
        return math.floor(x + 1e-6)  # the ratio of two whole numbers may be a little too small

    height, width = image_size
    crop_ratio = preprocess['crop_ratio']
    return rounded(height / crop_ratio), rounded(width / crop_ratio)


def fitted_size(height, width, image_size: tuple[int, int], preprocess: Mapping, larger=max):
    """The (height, width) to which evaluation resizes an image before the central crop.

    'squash' resizes to image_size / crop_ratio. The other values of `fit` keep the aspect ratio and
    choose the smallest size that covers image_size / crop_ratio. Sizes are computed in integers, so
    that Python and TensorFlow agree; for TensorFlow, `larger` is tf.maximum.
    """
    fit = preprocess['fit']
    target_h, target_w = target_size(image_size, preprocess)
    if fit == 'squash':
        return target_h, target_w
    half_h = height if fit == 'cover' else 0  # rounds to the nearest, or down
    half_w = width if fit == 'cover' else 0
    return (
        larger((2 * height * target_w + half_w) // (2 * width), target_h),
        larger((2 * width * target_h + half_h) // (2 * height), target_w),
    )


def crop_offset(difference, fit: str):
    """The first pixel of the central crop of a side; `difference` is side - crop, int or tensor."""
    if fit in ('torchvision', 'squash'):
        # torchvision rounds half a pixel to even numbers. timm also squashes with torchvision.
        return (difference + difference // 2 % 2) // 2
    return difference // 2


def resize_and_central_crop(
    image: Num[np.ndarray, 'rows columns 3'], size: tuple[int, int], preprocess: Mapping
) -> Float[np.ndarray, 'height width 3']:
    """Resizes and crops one image for evaluation, as `data.preprocess.eval_image` does.

    Args:
      image: values in 0..255; uint8 if `uint8_resize` is set.
      size: (height, width) of the result.
      preprocess: the fields fit, crop_ratio, resize, antialias and uint8_resize of
        `config.preprocess`.

    Returns:
      float32 values in 0..255.
    """
    rows, columns = image.shape[:2]
    height, width = size
    new_size = fitted_size(rows, columns, size, preprocess)
    new_height, new_width = new_size
    top = crop_offset(new_height - height, preprocess['fit'])
    left = crop_offset(new_width - width, preprocess['fit'])
    if new_size == (rows, columns):
        return image[top : top + height, left : left + width].astype(np.float32)
    method = preprocess['resize']
    if is_uint8_resize(preprocess):
        return uint8_resized(image, new_size, (top, left), size, method).astype(np.float32)
    resized = _antialiased if preprocess['antialias'] and method != 'area' else interpolated
    return resized(image, new_size, (top, left), size, method)


def is_uint8_resize(preprocess: Mapping) -> bool:
    """The field `uint8_resize`; False for a record of an earlier version without this field."""
    return preprocess.get('uint8_resize', False)


def uint8_resized(
    image: UInt8[np.ndarray, 'rows columns 3'],
    new_size: Sequence[int],
    begin: Sequence[int],
    size: Sequence[int],
    method: str,
) -> UInt8[np.ndarray, 'height width 3']:
    """A part of the resized image, with exactly the pixels that Pillow computes.

    The two sides are resized in the order of the installed version of Pillow, which differs between
    versions 12 and 13. The order matters for tall images where a filter overshoots.

    Args:
      new_size: (height, width) of the whole resized image.
      begin: (top, left) of the part.
      size: (height, width) of the part.
      method: one of RESAMPLING.
    """
    top, left = (int(x) for x in begin)
    height, width = (int(x) for x in size)
    new_height, new_width = (int(x) for x in new_size)
    resampling = RESAMPLING[method]
    whole = Image.fromarray(image)
    if new_height * new_width <= THIN * height * width:
        resized = whole.resize((new_width, new_height), resampling)
        return np.asarray(resized.crop((left, top, left + width, top + height)))
    # Only the part is resized, one side after the other, in the order for the whole image.
    x_scale = whole.width / new_width
    y_scale = whole.height / new_height

    def resize_width(part):
        box = (left * x_scale, 0, (left + width) * x_scale, part.height)
        return part.resize((width, part.height), resampling, box)

    def resize_height(part):
        box = (0, top * y_scale, part.width, (top + height) * y_scale)
        return part.resize((part.width, height), resampling, box)

    if is_height_first(image.shape[:2], (new_height, new_width)):
        return np.asarray(resize_width(resize_height(whole)))
    return np.asarray(resize_height(resize_width(whole)))


def is_height_first(old_size: Sequence[int], new_size: Sequence[int]) -> bool:
    """Whether Pillow resizes the height of an image first; sizes are (height, width)."""
    removed_rows = old_size[0] - new_size[0]
    removed_columns = old_size[1] - new_size[1]
    is_tall = removed_rows > 0 and removed_rows > 2 * removed_columns
    return RESIZES_TALL_IMAGES_DOWNWARDS_FIRST and is_tall


def _antialiased(image, new_size, begin, size, method):
    """A part of the resized image; each new pixel uses all old pixels in its area.

    Arguments are as for `uint8_resized`.
    """
    top, left = begin
    height, width = size
    window = (left, top, left + width, top + height)  # of the whole resized image
    box = None  # resizes the whole image
    if new_size[0] * new_size[1] > THIN * height * width:
        y_scale = image.shape[0] / new_size[0]
        x_scale = image.shape[1] / new_size[1]
        box = (left * x_scale, top * y_scale, window[2] * x_scale, window[3] * y_scale)
        new_size = size
        window = (0, 0, width, height)
    # Channel by channel, because Pillow has no colours in floats, and because it needs less memory.
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
    """A part of the resized image; each new pixel is interpolated between the nearest old pixels.

    This is the default of tf.image.resize. With the method 'area', a new pixel is the mean of its
    area. Arguments are as for `uint8_resized`.
    """
    # The axis that shrinks more comes first: an image may be a thousand times as wide as high.
    for axis in sorted((0, 1), key=lambda axis: size[axis] / image.shape[axis]):
        places, weights = _taps(image.shape[axis], new_size[axis], begin[axis], size[axis], method)
        pixels = np.take(image, places, axis).astype(np.float32)  # [new, taps] instead of [old]
        weighted_sum = 'nt...,nt->n...' if axis == 0 else 'rnt...,nt->rn...'
        image = np.einsum(weighted_sum, pixels, weights)
    return image


def _taps(old, new, begin, count, method):
    """The old pixels that each of `count` new pixels from `begin` on reads, and their weights.

    Both arrays are [count, taps].
    """
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
    """The kernel of Keys, Cubic convolution interpolation, 1981, with a = -1/2."""
    x = np.abs(x)
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2)


_KERNELS = {
    'bilinear': (1, lambda x: 1 - np.abs(x)),
    'bicubic': (2, _bicubic),
    'lanczos3': (3, lambda x: np.sinc(x) * np.sinc(x / 3)),
}
