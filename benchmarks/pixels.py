"""How many pixels of photos differ from Pillow's, with fractions and with rounding.

    python -m benchmarks.pixels DIRECTORY [--photos=200] [--size=224] [--resize=bicubic]

Photos are prepared as timm prepares them for the released ViT-Ti/16, and compared with Pillow's own
resizing and timm's crop.
"""

import argparse
import math

import numpy as np
from PIL import Image

from vit_jax import files
from vit_jax.data import images, resizing
from vit_jax.predict import find_images

CROP_RATIO = 0.9
FAR = 1.5  # grey levels


def main(argv=None):
    """Prints one line for each way of rounding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('directory')
    parser.add_argument('--photos', type=int, default=200)
    parser.add_argument('--size', type=int, default=224)
    parser.add_argument('--resize', default='bicubic', choices=sorted(resizing.RESAMPLING))
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
        far, largest = [], 0.0
        for path in paths:
            photo = images.decode(files.read_bytes(path))
            theirs = by_pillow(photo, options.size, options.resize)
            ours = resizing.resize_and_central_crop(photo, (options.size,) * 2, preprocess)
            difference = np.abs(ours - theirs).max(axis=-1)
            far.append(np.mean(difference > FAR))
            largest = max(largest, float(difference.max()))
        print(
            f'uint8_resize={uint8_resize}: {100 * np.mean(far):.3f} % of the pixels of '
            f'{len(paths)} photos differ by more than {FAR} of 255, the largest by {largest:.1f}; '
            f'{100 * np.mean(np.array(far) > 0):.1f} % of the photos have such a pixel'
        )


def by_pillow(photo, size, method):
    """timm's evaluation: the short side is resized, and the middle cut out."""
    image = Image.fromarray(photo)
    target = math.floor(size / CROP_RATIO)
    short, long = sorted(image.size)
    other = int(target * long / short)
    new_size = (other, target) if image.width > image.height else (target, other)
    image = image.resize(new_size, resizing.RESAMPLING[method])
    left, top = (round((side - size) / 2) for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)), np.float32)


if __name__ == '__main__':
    main()
