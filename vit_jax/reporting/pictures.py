"""Pictures in a page: arrays as data URIs of image files."""

import base64
import io

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vit_jax.data import images
from vit_jax.errors import UserError
from vit_jax.files import read_bytes

SMALL = 64  # a picture keeps every pixel if its longer side has at most this number
MOST_WEBP = 16_383  # largest side of WebP in pixels; WebP takes half the bytes of PNG


def thumbnail(image: UInt8[np.ndarray, 'height width 3'], side: int) -> UInt8[np.ndarray, '...']:
    """Returns the image, reduced to at most `side` pixels on the longer side."""
    if max(image.shape[:2]) <= side:
        return image
    small = Image.fromarray(image)
    small.thumbnail((side, side))
    return np.asarray(small)


def uri(image: UInt8[np.ndarray, '...']) -> str:
    """Returns a data URI: JPEG for large RGB pictures, a lossless format for all others."""
    if image.ndim == 3 and image.shape[2] == 3 and max(image.shape[:2]) > SMALL:
        kind = 'JPEG'
        options = dict(quality=85)
    elif max(image.shape[:2]) <= MOST_WEBP:
        kind = 'WEBP'
        options = dict(lossless=True, exact=True)
    else:
        kind = 'PNG'
        options = {}
    with io.BytesIO() as file:
        Image.fromarray(image).save(file, kind, **options)
        encoded = base64.b64encode(file.getvalue()).decode()
    return f'data:image/{kind.lower()};base64,{encoded}'


def of_file(path: str, side: int) -> str:
    """Returns a data URI of a photo, upright, with at most `side` pixels on the longer side.

    Raises:
      UserError: if the photo cannot be read.
    """
    try:
        image = images.decode(read_bytes(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f'{path!r} cannot be read: {error}.', kind='unreadable', file=path
        ) from error
    return uri(thumbnail(image, side))
