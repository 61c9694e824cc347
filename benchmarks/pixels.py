"""Counts the pixels of prepared photos that differ from Pillow's, with and without rounding.

    python -m benchmarks.pixels DIRECTORY [--photos=200] [--size=224] [--resize=bicubic]

Photos are prepared like by timm for the released ViT-Ti/16, and compared with Pillow's own resizing
and timm's crop.
"""

import argparse
import math

import numpy as np
from PIL import Image

from vit_jax import files
from vit_jax.data import images, resizing
from vit_jax.predict import find_images

CROP_RATIO = 0.9
TOLERANCE = 1.5  # grey levels


def main(argv=None):
    """Prints a line for preparation without rounding and a line with rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('directory', help='directory of photos')
    parser.add_argument('--photos', type=int, default=200, help='number of photos')
    parser.add_argument('--size', type=int, default=224, help='height and width after the crop')
    parser.add_argument(
        '--resize',
        default='bicubic',
        choices=sorted(resizing.RESAMPLING),
        help='resize method',
    )
    options = parser.parse_args(argv)
    paths = find_images([options.directory])
    paths = paths[:: max(len(paths) // options.photos, 1)][: options.photos]
    for uint8_resize in (False, True):
        preprocess = {
            'fit': 'torchvision',
            'crop_ratio': CROP_RATIO,
            'resize': options.resize,
            'antialias': True,
            'uint8_resize': uint8_resize,
        }
        shares = []
        largest = 0.0
        for path in paths:
            photo = images.decode(files.read_bytes(path))
            expected = by_pillow(photo, options.size, options.resize)
            size = (options.size, options.size)
            prepared = resizing.resize_and_central_crop(photo, size, preprocess)
            difference = np.abs(prepared - expected).max(axis=-1)
            shares.append(np.mean(difference > TOLERANCE))
            largest = max(largest, float(difference.max()))
        share_of_photos = np.mean(np.array(shares) > 0)
        print(
            f'uint8_resize={uint8_resize}: {100 * np.mean(shares):.3f} % of the pixels of '
            f'{len(paths)} photos differ by more than {TOLERANCE} of 255, at most by '
            f'{largest:.1f}; {100 * share_of_photos:.1f} % of the photos have such a pixel'
        )


def by_pillow(photo, size, method):
    """Prepares a photo like timm's evaluation: resizes the short side and crops the centre."""
    image = Image.fromarray(photo)
    target = math.floor(size / CROP_RATIO)
    short, long = sorted(image.size)
    new_long = int(target * long / short)
    is_wide = image.width > image.height
    new_size = (new_long, target) if is_wide else (target, new_long)
    image = image.resize(new_size, resizing.RESAMPLING[method])
    left = round((image.width - size) / 2)
    top = round((image.height - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)), np.float32)


if __name__ == '__main__':
    main()
