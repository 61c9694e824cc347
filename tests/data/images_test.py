"""Prediction without TensorFlow sees the pixels that training and evaluation see."""

import importlib
import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tests.support.images import encode, evaluated, files, oriented, picture
from vit_jax.config import base
from vit_jax.data import images, preprocess
from vit_jax.errors import UserError

FILES = files()

decode_in_pipeline = tf.function(preprocess.decode_image,
                                 input_signature=[tf.TensorSpec([], tf.string)])


def pillow(encoded):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert('RGB'))


def load(tmp_path, encoded, image_size=(32, 32), **changes):
    (tmp_path / 'file').write_bytes(encoded)
    return images.load(str(tmp_path / 'file'), image_size, {**base().preprocess, **changes})


def test_the_files_below_cover_every_format():
    assert {Image.open(io.BytesIO(encoded)).format for _, encoded in FILES} == set(images.FORMATS)
    assert {'.jpg', '.jpeg', '.png', '.gif', '.bmp', '.webp', '.tif', '.tiff', '.avif', '.jp2',
            '.ppm'} <= set(images.SUFFIXES)


@pytest.mark.parametrize(('name', 'encoded'), FILES, ids=[name for name, _ in FILES])
def test_pixels_are_those_of_the_pipeline(name, encoded):
    pixels = decode_in_pipeline(encoded).numpy()
    np.testing.assert_array_equal(images.decode(encoded), pixels)
    if not any(word in name for word in ('16', 'CMYK', 'YCCK')):
        np.testing.assert_array_equal(pixels, pillow(encoded))


@pytest.mark.parametrize(('name', 'encoded'), FILES, ids=[name for name, _ in FILES])
def test_a_file_cut_short_is_broken_for_both(name, encoded, tmp_path):
    if any(word in name for word in ('gif animated', 'tiff of pages')):
        encoded = encoded[:len(encoded) // 3]  # what comes later is not of the first picture
    for length in (1, 7, len(encoded) // 50, len(encoded) // 2, int(len(encoded) * 0.95)):
        with pytest.raises(UserError, match='file. cannot be read: '):
            load(tmp_path, encoded[:length])
        with pytest.raises(tf.errors.OpError):
            decode_in_pipeline(encoded[:length])


@pytest.mark.parametrize('kind', ['JPEG', 'PNG'])
def test_both_agree_on_which_last_bytes_may_be_missing(kind, tmp_path):
    encoded = encode(picture(9, 7), kind)
    for missing in range(1, 30):
        with pytest.raises(UserError):
            load(tmp_path, encoded[:-missing])
        with pytest.raises(tf.errors.OpError):
            decode_in_pipeline(encoded[:-missing])
    np.testing.assert_array_equal(images.decode(encoded + b'more'), pillow(encoded))
    np.testing.assert_array_equal(decode_in_pipeline(encoded + b'more'), pillow(encoded))


def test_other_kinds_of_files_are_broken_for_both(tmp_path):
    others = [b'', b'no image', encode(picture(8, 8), 'EPS'), encode(picture(8, 8), 'ICO'),
              encode(picture(8, 8), 'PDF'), encode(picture(8, 8), 'TGA')]
    for encoded in others:
        message = f'not an image of {", ".join(images.FORMATS)}' if encoded else 'the file is empty'
        with pytest.raises(UserError, match=message):
            load(tmp_path, encoded)
        with pytest.raises(tf.errors.OpError, match=message):
            decode_in_pipeline(encoded)


@pytest.mark.parametrize('method', ['bilinear', 'bicubic', 'lanczos3'])
@pytest.mark.parametrize(('image_size', 'crop_ratio'), [((32, 32), 0.875), ((96, 64), 1.0)])
def test_resizing_is_that_of_the_pipeline(method, image_size, crop_ratio, tmp_path):
    encoded = encode(picture(61, 83), 'PNG')
    changes = {'resize': method, 'crop_ratio': crop_ratio, 'mean': (0.4, 0.5, 0.6)}
    expected = evaluated(encoded, image_size, {**base().preprocess, **changes})
    np.testing.assert_allclose(load(tmp_path, encoded, image_size, **changes), expected, atol=2e-5)


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'TIFF', 'WEBP', 'AVIF'])
def test_exif_orientation(kind, orientation):
    encoded = encode(picture(16, 24), kind, exif=oriented(orientation))
    np.testing.assert_array_equal(images.decode(encoded), pillow(encoded))
    np.testing.assert_array_equal(decode_in_pipeline(encoded), pillow(encoded))


def test_unreadable_exif_leaves_the_image_as_it_is():
    plain = encode(picture(16, 24), 'JPEG')
    damaged = plain[:2] + b'\xff\xe1\x00\x10Exif\x00\x00garbage!' + plain[2:]
    np.testing.assert_array_equal(images.decode(damaged), pillow(plain))
    np.testing.assert_array_equal(decode_in_pipeline(damaged), pillow(plain))


def test_exif_is_looked_for_at_the_beginning_by_both():
    """What stands behind the pixels of a large PNG file does not turn it."""
    png = encode(picture(200, 230), 'PNG', exif=oriented(6))
    at = png.index(b'eXIf') - 4
    chunk = png[at:at + 12 + int.from_bytes(png[at:at + 4], 'big')]
    moved = png.replace(chunk, b'').replace(b'\0\0\0\0IEND', chunk + b'\0\0\0\0IEND')
    assert moved.index(b'eXIf') > images.HEADER_BYTES
    assert images.decode(png).shape == (230, 200, 3)
    assert images.decode(moved).shape == (200, 230, 3)
    np.testing.assert_array_equal(images.decode(moved), decode_in_pipeline(moved))


def test_inks_become_the_colours_of_pillow():
    """Of a CMYK JPEG; TensorFlow rounds down, and prediction with it."""
    encoded = encode(picture(61, 83, 'CMYK'), 'JPEG')
    difference = pillow(encoded).astype(int) - images.decode(encoded)
    assert difference.min() == 0
    assert difference.max() == 1


@pytest.mark.parametrize('kind', ['PNG', 'TIFF', 'PPM', 'JPEG2000'])
def test_sixteen_bits_of_grey_keep_the_upper_eight(kind):
    image = picture(40, 40, 'I;16')
    expected = np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, -1)
    np.testing.assert_array_equal(images.decode(encode(image, kind)), expected)


def test_the_first_frame_of_several():
    first = picture(20, 30, 'P', seed=1)
    for kind in ('GIF', 'TIFF', 'PNG'):
        encoded = encode(first, kind, save_all=True, append_images=[picture(20, 30, 'P', seed=2)])
        np.testing.assert_array_equal(images.decode(encoded), np.asarray(first.convert('RGB')))


def test_a_pillow_without_avif(tmp_path, monkeypatch):
    encoded = encode(picture(9, 9), 'JPEG')
    with monkeypatch.context() as patch:
        patch.setattr(Image, 'OPEN', {k: x for k, x in Image.OPEN.items() if k != 'AVIF'})
        importlib.reload(images)
        assert load(tmp_path, encoded, (8, 8)).shape == (8, 8, 3)
        assert 'AVIF' not in images.FORMATS
    importlib.reload(images)


def test_files_that_cannot_be_read_are_named(tmp_path):
    bomb = bytearray(encode(Image.new('1', (1, 1)), 'BMP'))
    bomb[18:26] = np.array([30_000, 30_000], '<i4').tobytes()  # width and height
    with pytest.raises(UserError, match='file. cannot be read: .*bomb'):
        load(tmp_path, bytes(bomb))
    with pytest.raises(UserError, match='there is no image .*gone.jpg'):
        images.load(str(tmp_path / 'gone.jpg'), (32, 32), base().preprocess)
    with pytest.raises(UserError, match='cannot be read: .*directory'):
        images.load(str(tmp_path), (32, 32), base().preprocess)
    with pytest.raises(UserError, match="the resize method of the weights is 'nearest'"):
        load(tmp_path, b'', resize='nearest')
