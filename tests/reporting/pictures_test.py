import base64
import io

import numpy as np
from PIL import Image

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
