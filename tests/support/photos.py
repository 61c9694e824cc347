"""Real photos, if the machine has them, and drawn ones."""

import functools
import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.support.runs import ROOT

DATA = ROOT.parent / 'shared/data'
needs_photos = pytest.mark.skipif(not DATA.is_dir(), reason=f'needs the photos in {DATA}')


def photos_with_edges():
    """Twenty drawn pictures of various shapes, smaller and larger than 224 px.

    They have hard edges and lines, where a bicubic filter overshoots black and white most.
    """
    rng = np.random.default_rng(0)
    pictures = []
    for number in range(20):
        height, width = rng.integers(60, 400, 2)
        grid = rng.choice(
            np.array([0, 20, 235, 255], np.uint8), (height // 9 + 1, width // 9 + 1, 3)
        )
        pixels = grid.repeat(9, 0).repeat(9, 1)[:height, :width]
        if number % 2:  # lines of one pixel
            pixels[::5] = 255
            pixels[:, ::7] = 0
        pictures.append(Image.fromarray(np.ascontiguousarray(pixels)))
    return pictures


@functools.cache
def photos():
    """Twenty flowers and clothes. Some are made grey, smaller than 224 px, or long and thin."""
    images = []
    for name in ('flowers17', 'clothing'):
        with tarfile.open(DATA / f'{name}.tar') as file:
            members = [m for m in file.getmembers() if m.name.endswith('.jpg')]
            for number, member in enumerate(members[:: len(members) // 10][:10]):
                photo = Image.open(io.BytesIO(file.extractfile(member).read())).convert('RGB')
                change = {
                    1: lambda x: x.convert('L').convert('RGB'),
                    2: lambda x: x.resize((150, 100)),
                    3: lambda x: x.resize((90, 200)),
                    4: lambda x: x.crop((0, 100, x.width, 160)),
                    5: lambda x: x.crop((90, 0, 160, x.height)),
                }.get(number, lambda x: x)
                images.append(change(photo))
    assert len(images) == 20
    return images
