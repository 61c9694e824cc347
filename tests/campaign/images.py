"""Image files of every format, damaged, or with shapes that need much memory.

Prediction and evaluation must prepare the image or report that it cannot be read. In evaluation, a
good image in the same data set must not be lost.
"""

import pathlib
import random
import re
import shutil
import struct
import zlib

import numpy as np
from PIL import Image

from tests.campaign import mutate
from tests.campaign.cases import Failure
from vit_jax import config as config_lib
from vit_jax.data import images
from vit_jax.errors import UserError

KEEP_BYTES = True
SECONDS = 20
GIGABYTES = 4
QUOTA = 500
SIZE = (16, 16)
GOOD = 'good.png'
# (width, height) of black images whose files are small.
SHAPES = (
    (2000, 1),
    (1, 2000),
    (65500, 1),
    (1, 65500),
    (1, 1),
    (3, 30000),
    (12000, 12000),
    (20000, 5),
    (5000, 5000),
)


def prepare(bases):
    from tests.support import images as made

    for name, data in made.files():
        (bases / (re.sub(r'\W+', '_', name) + f'.{name.split()[0]}')).write_bytes(data)
    (bases / GOOD).write_bytes(made.encode(made.picture(20, 30), 'PNG'))


def draw(rng, bases):
    if rng.random() < 0.1:
        return GOOD, [('shape', rng.randrange(len(SHAPES)), rng.choice(('png', 'jpeg', 'webp')))]
    base = rng.choice(sorted(path.name for path in bases.iterdir()))
    if rng.random() < 0.15:
        return base, [('size', rng.randrange(1 << 30))]
    return base, [mutate.draw_in_place(rng, 0.05) for _ in range(rng.choice((1, 1, 2, 4)))]


def make(case, bases):
    folder = pathlib.Path('data/test/ant')
    folder.mkdir(parents=True)
    name = case.base.rpartition('.')[2].replace('jpeg2000', 'jp2')
    path = folder / f'changed.{name}'
    shutil.copy(bases / case.base, path)
    shutil.copy(bases / GOOD, folder / GOOD)
    for operation, *parameters in case.changes:
        if operation == 'shape':
            path = _write_shape(path, *parameters)
        elif operation == 'size':
            path.write_bytes(_with_size(path.read_bytes(), random.Random(*parameters)))
        else:
            mutate.in_place(path, operation, *parameters)


def _write_shape(path, number, kind):
    width, height = SHAPES[number]
    if kind == 'webp' and max(width, height) > 16383:
        kind = 'png'
    path.unlink()
    path = path.with_suffix(f'.{kind}')
    Image.new('RGB', (width, height)).save(path, kind)
    return path


def _with_size(data, rng):
    """Changes the size in the header of an image file, in formats whose header is known."""
    side = rng.choice((0, 1, 255, 16000, 32767, 65535))
    if data.startswith(b'\x89PNG'):
        big = rng.choice((0, 1, 60000, 2**20, 2**31 - 1))
        header = b'IHDR' + struct.pack('>II', rng.choice((1, big)), big) + data[24:29]
        return data[:12] + header + struct.pack('>I', zlib.crc32(header)) + data[33:]
    match = re.search(rb'\xff[\xc0-\xc2]..\x08', data, re.DOTALL)
    if data.startswith(b'\xff\xd8') and match:
        return data[: match.end()] + struct.pack('>HH', side, side) + data[match.end() + 4 :]
    if data.startswith(b'GIF'):
        return data[:6] + struct.pack('<HH', side, side) + data[10:]
    if data.startswith(b'BM'):
        return data[:18] + struct.pack('<ii', side, rng.choice((side, -side))) + data[26:]
    if data.startswith((b'P4', b'P5', b'P6')):
        return re.sub(rb'^(P\d\s+)\d+ \d+', rb'\g<1>%d %d' % (side, side), data)
    return mutate.BYTES['number'](data, rng)


def check(case, bases):
    folder = pathlib.Path('data/test/ant')
    changed = next((path for path in folder.iterdir() if path.name != GOOD), folder / 'missing.png')
    preprocess = dict(config_lib.base().preprocess)
    prediction = 'predicted'
    try:
        _require_image(images.load(str(changed), SIZE, preprocess))
    except UserError:
        prediction = 'refused'
    evaluation = 'evaluated' if _evaluate(preprocess) == 2 else 'left out'
    return f'{prediction} {evaluation}'


def _evaluate(preprocess):
    """The number of images that evaluation reads, including the good one."""
    from vit_jax.data import pipeline, sources

    source = sources.open_source('data', 'test')
    batches = pipeline.eval_batches(
        source,
        batch_size=2,
        image_size=SIZE,
        preprocess=preprocess,
        files_at_once=1,
        max_broken_fraction=1.0,
    )
    count = 0
    for batch in batches:
        for image, valid in zip(batch['image'], batch['mask'], strict=True):
            if valid:
                _require_image(image)
                count += 1
    if count not in (1, 2):
        raise Failure('silent', f'{count} of 2 images were evaluated')
    return count


def _require_image(image):
    if image.shape != (*SIZE, 3) or not np.isfinite(image).all():
        raise Failure('silent', f'pixels of shape {image.shape}, or not finite')
