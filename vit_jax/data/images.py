"""Image files to what a model sees, without TensorFlow: the same pixels as data/preprocess.py."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageOps, UnidentifiedImageError

from vit_jax.errors import UserError, check_choice

RESAMPLING = {'bilinear': Image.Resampling.BILINEAR, 'bicubic': Image.Resampling.BICUBIC,
              'lanczos3': Image.Resampling.LANCZOS}
# Not all that Pillow knows: it has Ghostscript draw PostScript, and takes films and PDF for images.
_PICTURES = ('AVIF', 'BMP', 'GIF', 'JPEG', 'JPEG2000', 'PNG', 'PPM', 'TIFF', 'WEBP')
SUFFIXES = tuple(suffix for suffix, name in Image.registered_extensions().items()
                 if name in _PICTURES)
FORMATS = tuple(name for name in _PICTURES if name in Image.OPEN)  # older ones have no AVIF


def load(path: str, image_size: tuple[int, int], preprocess: Mapping
         ) -> Float[np.ndarray, 'height width 3']:
    """One image file as evaluation shows it to a model, float32.

    Any of FORMATS in any mode: greyscale, 16 bits, palette, CMYK; turned upright as its EXIF data
    says; transparency is left out, as in training.

    Args:
      image_size: (height, width) in pixels.
      preprocess: resize, crop_ratio, mean and std as in `config.preprocess`.

    Raises:
      UserError: the file is not there or is no image that can be read to its end.
    """
    check_choice('the resize method of the weights', preprocess['resize'], tuple(RESAMPLING))
    try:
        with Image.open(path, formats=FORMATS) as image:
            rgb = to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise UserError(f'there is no image {path!r}.') from None
    except UnidentifiedImageError:
        raise UserError(f'{path!r} is no image of {", ".join(FORMATS)}.') from None
    except MemoryError:
        raise
    except Exception as error:  # what decoders raise is not documented, and the file is not ours
        raise UserError(f'{path!r} cannot be read: {error}.') from error
    pixels = resize_and_central_crop(rgb, image_size, preprocess)
    mean, std = (np.asarray(preprocess[name], np.float32) for name in ('mean', 'std'))
    return (pixels / np.float32(255) - mean) / std


def to_rgb(image: Image.Image) -> np.ndarray:
    """uint8 [height, width, 3]; 16 bits of grey become their upper 8."""
    if image.mode.startswith('I;16') or image.mode == 'I':
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    return np.asarray(image.convert('RGB'))


def resize_and_central_crop(image: np.ndarray, size: tuple[int, int], preprocess: Mapping
                            ) -> Float[np.ndarray, 'height width 3']:
    """As data.preprocess.resize_and_central_crop, which describes it; float32 in 0..255."""
    target_h, target_w = (round(side / preprocess['crop_ratio']) for side in size)
    height, width = image.shape[:2]
    if target_h * width >= target_w * height:
        new_size = target_h, (2 * width * target_h + height) // (2 * height)
    else:
        new_size = (2 * height * target_w + width) // (2 * width), target_w
    pixels = image.astype(np.float32)
    if new_size != (height, width):
        method = RESAMPLING[preprocess['resize']]
        pixels = np.stack([np.asarray(Image.fromarray(channel).resize(new_size[::-1], method))
                           for channel in np.moveaxis(pixels, -1, 0)], axis=-1)
    top, left = ((new - side) // 2 for new, side in zip(new_size, size, strict=True))
    return pixels[top:top + size[0], left:left + size[1]]
