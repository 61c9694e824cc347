"""The supported image formats, and the steps in NumPy from an image file to the input of a model.

Prediction reads every file with this module, without TensorFlow. Training and evaluation
(data/preprocess.py) decode JPEG, PNG and uncompressed BMP with TensorFlow, which is faster, and all
other formats with this module. The pixels are the same. docs/reference/data.md has a table of the
pixels of every kind of image.
"""

import io
import warnings
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, UInt8
from PIL import ExifTags, Image, UnidentifiedImageError

from vit_jax.data import heic, resizing
from vit_jax.errors import UserError
from vit_jax.files import read_bytes

# Not every format of Pillow: it also runs Ghostscript for PostScript and opens films and PDF files.
_SUPPORTED = ('AVIF', 'BMP', 'GIF', 'JPEG', 'JPEG2000', 'PNG', 'PPM', 'TIFF', 'WEBP')
SUFFIXES_WITHOUT_HEIC = tuple(
    suffix for suffix, name in Image.registered_extensions().items() if name in _SUPPORTED
)
SUFFIXES = (*SUFFIXES_WITHOUT_HEIC, *heic.SUFFIXES)
# The formats that Pillow decodes. Older versions of Pillow have no AVIF.
FORMATS = tuple(name for name in _SUPPORTED if name in Image.OPEN)

# A larger image counts as broken in training and prediction: decoding needs up to 20 bytes of
# memory per pixel. Cameras of 108 megapixels stay below the limit, and no JPEG has a longer side.
MAX_PIXELS = 120_000_000
MAX_SIDE = 65_535
# The limits above replace Pillow's own limit and its warning.
warnings.filterwarnings('ignore', category=Image.DecompressionBombWarning)

# Metadata with an orientation has one of these words in the first bytes of a JPEG or PNG file,
# before the pixels. Searching a whole large file would take a third of its decoding time.
ORIENTATION_WORDS = ('exif', 'tiff:orientation')
HEADER_BYTES = 1 << 16
_TOO_LARGE = (
    f'more than the limit of {MAX_PIXELS:,} pixels for decoding, or of {MAX_SIDE:,} on a side'
)
_PNG_END = b'IEND\xaeB`\x82'


def is_image(name: str, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Whether a file has the ending of a supported image format."""
    return name.lower().endswith(suffixes)


def load(
    path: str, image_size: tuple[int, int], preprocess: Mapping
) -> Float[np.ndarray, 'height width 3']:
    """Reads one image file and prepares it as for evaluation.

    Args:
      image_size: (height, width) in pixels.
      preprocess: the fields of `config.preprocess`.

    Returns:
      Normalised pixels, float32.

    Raises:
      UserError: if the file is missing or cannot be read.
    """
    try:
        rgb = decode(read_bytes(path))
    except FileNotFoundError:
        raise UserError(f'there is no image {path!r}.', kind='missing', file=path) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f'{path!r} cannot be read: {error}.', kind='unreadable', file=path
        ) from error
    return prepared(rgb, image_size, preprocess)


def prepared(
    rgb: UInt8[np.ndarray, 'rows columns 3'], image_size: tuple[int, int], preprocess: Mapping
) -> Float[np.ndarray, 'height width 3']:
    """One decoded image, resized, cropped and normalised as for evaluation; see `load`."""
    pixels = resizing.resize_and_central_crop(rgb, image_size, preprocess)
    mean = np.asarray(preprocess['mean'], np.float32)
    std = np.asarray(preprocess['std'], np.float32)
    return (pixels / np.float32(255) - mean) / std


def decode(encoded: bytes) -> UInt8[np.ndarray, 'height width 3']:
    """The pixels of a HEIC photo, or of a file of any format in FORMATS, turned upright.

    Only the first frame of an image is decoded. Transparency is dropped, but the colours of
    transparent pixels stay.

    Raises:
      ValueError: if the format is not supported, or the file is damaged, cut short or too large.
    """
    if not encoded:
        raise ValueError('the file is empty')
    try:
        if heic.is_heic(encoded):
            return _decode_heic(encoded)
        return _decode_by_pillow(encoded)
    except UnidentifiedImageError:
        raise ValueError(f'not an image of {", ".join(FORMATS)} or HEIC') from None
    except Image.DecompressionBombError as error:
        raise ValueError(f'the image is {_TOO_LARGE}') from error
    except MemoryError:
        raise
    except Exception as error:  # decoders do not document their errors for damaged files
        raise ValueError(str(error) or type(error).__name__) from error


def _decode_heic(encoded):
    photo = heic.read(encoded)
    _check_size(*photo.size)
    return _to_rgb(photo.to_pillow())


def _decode_by_pillow(encoded):
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        _check_size(*image.size)
        if image.format == 'PNG' and _PNG_END not in encoded:  # Pillow does not check this
            raise ValueError('the PNG file is cut short')
        pixels = _to_rgb(image)
        header = encoded[:HEADER_BYTES].lower()
        if image.format in ('JPEG', 'PNG') and not any(
            word.encode() in header for word in ORIENTATION_WORDS
        ):
            return pixels
        return turn_upright(pixels, image)


def _check_size(width, height):
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ValueError(f'{width} x {height} is {_TOO_LARGE}')


def _to_rgb(image):
    if image.mode.startswith('I;16') or image.mode == 'I':
        # The upper 8 of the 16 bits.
        grey = np.clip(np.asarray(image) >> 8, 0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    if image.mode == 'CMYK' and image.format == 'JPEG':
        # As in TensorFlow. Files written by Adobe contain 255 - ink; Pillow treats every file so.
        light = np.asarray(image)
        if 'adobe' in image.info:
            light = 255 - light
        return (light[..., :3] * light[..., 3:].astype(np.uint16) // 255).astype(np.uint8)
    return np.asarray(image.convert('RGB'))


def turn_upright(
    pixels: UInt8[np.ndarray, 'rows columns 3'], image: Image.Image
) -> UInt8[np.ndarray, 'height width 3']:
    """The pixels of an image, rotated and mirrored according to its EXIF or XMP orientation."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # unreadable metadata does not make an image unreadable
        return pixels
    if orientation in (5, 6, 7, 8):  # in the EXIF standard, these exchange rows and columns
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
