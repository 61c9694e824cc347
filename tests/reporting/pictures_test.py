import base64
import io

import numpy as np
from PIL import Image

from tests.support.errors import refused
from vit_jax.reporting import pictures


def opened(uri):
    head, _, data = uri.partition(',')
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == f'data:image/{image.format.lower()};base64'
    return image


def test_small_pictures_are_lossless_and_large_ones_compressed():
    image = np.random.default_rng(1).integers(0, 256, (8, 6, 3)).astype(np.uint8)
    np.testing.assert_array_equal(np.asarray(opened(pictures.uri(image))), image)
    for width in (200, 20_000):
        grey = np.resize(np.arange(256, dtype=np.uint8), (2, width))
        np.testing.assert_array_equal(np.asarray(opened(pictures.uri(grey)).convert('L')), grey)
    opaque = np.random.default_rng(2).integers(0, 256, (90, 80, 4)).astype(np.uint8)
    np.testing.assert_array_equal(np.asarray(opened(pictures.uri(opaque))), opaque)
    photo = np.asarray(Image.linear_gradient('L').convert('RGB'))
    small = opened(pictures.uri(pictures.thumbnail(photo, 112)))
    assert (small.format, small.size) == ('JPEG', (112, 112))
    assert pictures.thumbnail(image, 8) is image


def test_a_photo_file_becomes_an_upright_thumbnail(tmp_path):
    photo = Image.linear_gradient('L').resize((400, 200)).convert('RGB')
    exif = photo.getexif()
    exif[274] = 6  # turned by 90 degrees
    photo.save(tmp_path / 'x.jpg', exif=exif)
    assert opened(pictures.of_file(str(tmp_path / 'x.jpg'), 100)).size == (50, 100)
    (tmp_path / 'y.jpg').write_bytes(b'no image')
    for name in ('y.jpg', 'z.jpg'):
        with refused('unreadable', file=tmp_path / name):
            pictures.of_file(str(tmp_path / name), 100)
