"""Prediction, without TensorFlow, has the same pixels as training and evaluation."""

import contextlib
import importlib
import io
import os
import resource
import time
import zlib

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tests.support.errors import refused
from tests.support.images import deep_tiff, encode, evaluated, files, oriented, picture
from vit_jax.config import base
from vit_jax.data import images, preprocess, resizing

FILES = files()

decode_in_pipeline = tf.function(
    preprocess.decode_image, input_signature=[tf.TensorSpec([], tf.string)]
)


def pillow(encoded):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert('RGB'))


def load(tmp_path, encoded, image_size=(32, 32), **changes):
    """Loads a file with these bytes."""
    (tmp_path / 'file').write_bytes(encoded)
    return images.load(str(tmp_path / 'file'), image_size, {**base().preprocess, **changes})


def test_the_files_of_these_tests_cover_every_format():
    formats = {Image.open(io.BytesIO(encoded)).format for _, encoded in FILES}
    # A JPEG file with two pictures is MPO for Pillow. HEIC has tests of its own.
    assert formats == {*images.FORMATS, 'MPO'}
    assert {
        '.jpg',
        '.jpeg',
        '.png',
        '.gif',
        '.bmp',
        '.webp',
        '.tif',
        '.tiff',
        '.avif',
        '.jp2',
        '.ppm',
    } <= set(images.SUFFIXES)


@pytest.mark.parametrize(('name', 'encoded'), FILES, ids=[name for name, _ in FILES])
def test_pixels_equal_the_pixels_of_the_pipeline(name, encoded):
    pixels = decode_in_pipeline(encoded).numpy()
    np.testing.assert_array_equal(images.decode(encoded), pixels)
    if not any(word in name for word in ('16', 'CMYK', 'YCCK')):
        np.testing.assert_array_equal(pixels, pillow(encoded))


@pytest.mark.parametrize(('name', 'encoded'), FILES, ids=[name for name, _ in FILES])
def test_a_file_cut_short_is_broken_for_both(name, encoded, tmp_path):
    if any(word in name for word in ('gif animated', 'tiff of pages', 'of two pictures')):
        encoded = encoded[: len(encoded) // 3]  # the bytes of the first picture
    for length in (1, 7, len(encoded) // 50, len(encoded) // 2, int(len(encoded) * 0.95)):
        with refused('unreadable', file=tmp_path / 'file'):
            load(tmp_path, encoded[:length])
        with pytest.raises(tf.errors.OpError):
            decode_in_pipeline(encoded[:length])


@pytest.mark.parametrize('kind', ['JPEG', 'PNG'])
def test_both_agree_on_which_last_bytes_may_be_missing(kind, tmp_path):
    encoded = encode(picture(9, 7), kind)
    for missing in range(1, 30):
        with refused('unreadable', file=tmp_path / 'file'):
            load(tmp_path, encoded[:-missing])
        with pytest.raises(tf.errors.OpError):
            decode_in_pipeline(encoded[:-missing])
    np.testing.assert_array_equal(images.decode(encoded + b'more'), pillow(encoded))
    np.testing.assert_array_equal(decode_in_pipeline(encoded + b'more'), pillow(encoded))


def test_both_read_a_bmp_file_without_the_padding_of_its_last_row(tmp_path):
    encoded = encode(picture(9, 7), 'BMP')  # with three bytes of padding
    for file in (encoded[:-3], encoded[:-1], encoded, encoded + b'more'):
        np.testing.assert_array_equal(decode_in_pipeline(file), images.decode(file))
    for missing in range(4, 30):
        with refused('unreadable', file=tmp_path / 'file'):
            load(tmp_path, encoded[:-missing])
        with pytest.raises(tf.errors.OpError):
            decode_in_pipeline(encoded[:-missing])


def test_other_kinds_of_files_are_broken_for_both(tmp_path):
    others = [
        b'',
        b'no image',
        encode(picture(8, 8), 'EPS'),
        encode(picture(8, 8), 'ICO'),
        encode(picture(8, 8), 'PDF'),
        encode(picture(8, 8), 'TGA'),
    ]
    for encoded in others:
        message = f'not an image of {", ".join(images.FORMATS)}' if encoded else 'the file is empty'
        with refused('unreadable', file=tmp_path / 'file'):
            load(tmp_path, encoded)
        with pytest.raises(tf.errors.OpError, match=message):
            decode_in_pipeline(encoded)


@pytest.mark.parametrize('method', [*resizing.RESAMPLING, 'area'])
@pytest.mark.parametrize(('image_size', 'crop_ratio'), [((32, 32), 0.875), ((96, 64), 1.0)])
def test_resized_pixels_equal_the_pixels_of_the_pipeline(method, image_size, crop_ratio, tmp_path):
    encoded = encode(picture(61, 83), 'PNG')
    changes = {'resize': method, 'crop_ratio': crop_ratio, 'mean': (0.4, 0.5, 0.6)}
    expected = evaluated(encoded, image_size, {**base().preprocess, **changes})
    np.testing.assert_allclose(load(tmp_path, encoded, image_size, **changes), expected, atol=2e-5)


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'TIFF', 'WEBP', 'AVIF'])
def test_images_are_turned_by_their_exif_orientation(kind, orientation):
    encoded = encode(picture(16, 24), kind, exif=oriented(orientation))
    np.testing.assert_array_equal(images.decode(encoded), pillow(encoded))
    np.testing.assert_array_equal(decode_in_pipeline(encoded), pillow(encoded))


def test_unreadable_exif_leaves_the_image_as_it_is():
    plain = encode(picture(16, 24), 'JPEG')
    damaged = plain[:2] + b'\xff\xe1\x00\x10Exif\x00\x00garbage!' + plain[2:]
    np.testing.assert_array_equal(images.decode(damaged), pillow(plain))
    np.testing.assert_array_equal(decode_in_pipeline(damaged), pillow(plain))


def test_both_search_for_exif_only_at_the_beginning():
    """EXIF data behind the pixels of a large PNG file does not turn it."""
    png = encode(picture(200, 230), 'PNG', exif=oriented(6))
    at = png.index(b'eXIf') - 4
    chunk = png[at : at + 12 + int.from_bytes(png[at : at + 4], 'big')]
    moved = png.replace(chunk, b'').replace(b'\0\0\0\0IEND', chunk + b'\0\0\0\0IEND')
    assert moved.index(b'eXIf') > images.HEADER_BYTES
    assert images.decode(png).shape == (230, 200, 3)
    assert images.decode(moved).shape == (200, 230, 3)
    np.testing.assert_array_equal(images.decode(moved), decode_in_pipeline(moved))


def test_a_cmyk_jpeg_has_the_colours_of_pillow_up_to_one_level():
    """TensorFlow rounds down, so prediction rounds down as well."""
    encoded = encode(picture(61, 83, 'CMYK'), 'JPEG')
    difference = pillow(encoded).astype(int) - images.decode(encoded)
    assert difference.min() == 0
    assert difference.max() == 1


@pytest.mark.parametrize('channels', [3, 4])
def test_sixteen_bits_of_colour_keep_the_upper_eight(channels):
    pixels = np.random.default_rng(0).integers(0, 2**16, (9, 7, channels)).astype(np.uint16)
    expected = (pixels[..., :3] >> 8).astype(np.uint8)
    for encoded in (deep_tiff(pixels), tf.io.encode_png(pixels).numpy()):
        np.testing.assert_array_equal(images.decode(encoded), expected)


@pytest.mark.parametrize('kind', ['PNG', 'TIFF', 'PPM', 'JPEG2000'])
def test_sixteen_bits_of_grey_keep_the_upper_eight(kind):
    image = picture(40, 40, 'I;16')
    expected = np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, -1)
    np.testing.assert_array_equal(images.decode(encode(image, kind)), expected)


@pytest.mark.parametrize(
    ('dtype', 'values', 'expected'),
    [
        (np.int32, [[0, 255, 256, 65_535, 70_000]], [0, 0, 1, 255, 255]),
        (np.float32, [[-1.0, 0.9, 1.0, 254.0, 300.0]], [0, 0, 1, 254, 255]),
    ],
)
def test_thirty_two_bits_of_grey_are_cut_off(dtype, values, expected):
    encoded = encode(Image.fromarray(np.array(values, dtype)), 'TIFF')
    for pixels in (images.decode(encoded), decode_in_pipeline(encoded).numpy()):
        np.testing.assert_array_equal(pixels, np.repeat(np.array([expected])[..., None], 3, -1))


def test_an_image_with_several_frames_gives_the_first():
    first = picture(20, 30, 'P', seed=1)
    for kind in ('GIF', 'TIFF', 'PNG'):
        encoded = encode(first, kind, save_all=True, append_images=[picture(20, 30, 'P', seed=2)])
        np.testing.assert_array_equal(images.decode(encoded), np.asarray(first.convert('RGB')))


def test_images_can_be_read_by_a_pillow_without_avif(tmp_path, monkeypatch):
    encoded = encode(picture(9, 9), 'JPEG')
    with monkeypatch.context() as patch:
        patch.setattr(Image, 'OPEN', {k: x for k, x in Image.OPEN.items() if k != 'AVIF'})
        importlib.reload(images)
        assert load(tmp_path, encoded, (8, 8)).shape == (8, 8, 3)
        assert 'AVIF' not in images.FORMATS
    importlib.reload(images)


def test_errors_name_the_file(tmp_path):
    bomb = bytearray(encode(Image.new('1', (1, 1)), 'BMP'))
    bomb[18:26] = np.array([30_000, 30_000], '<i4').tobytes()  # width and height
    with refused('unreadable', file=tmp_path / 'file') as caught:
        load(tmp_path, bytes(bomb))
    assert str(caught.value) == (
        f"'{tmp_path}/file' cannot be read: the image is more than the limit of 120,000,000 pixels "
        'for decoding, or of 65,535 on a side.'
    )
    with refused('missing', file=tmp_path / 'gone.jpg'):
        images.load(str(tmp_path / 'gone.jpg'), (32, 32), base().preprocess)
    os.mkfifo(tmp_path / 'pipe.jpg')
    (tmp_path / 'loop.jpg').symlink_to('loop.jpg')
    for path in (tmp_path, tmp_path / 'pipe.jpg', tmp_path / 'loop.jpg', '/dev/zero'):
        with refused('unreadable', file=path):
            images.load(str(path), (32, 32), base().preprocess)


def window_of_the_whole(encoded, size, preprocess):
    """Evaluation without its shortcut for thin images: resizes the whole image, then crops."""
    image = images.decode(encoded)
    new_size = resizing.fitted_size(*image.shape[:2], size, preprocess)
    whole = tf.image.resize(image, new_size, preprocess['resize'], antialias=True).numpy()
    top, left = ((new - side) // 2 for new, side in zip(new_size, size, strict=True))
    return whole[top : top + size[0], left : left + size[1]] / 127.5 - 1


@pytest.mark.parametrize(
    ('shape', 'method'),
    [((1, 2000), 'bilinear'), ((2000, 2), 'bicubic'), ((3, 900), 'lanczos3'), ((700, 2), 'area')],
)
def test_thin_images_are_cropped_before_they_are_resized(shape, method, tmp_path):
    size = (16, 24)
    preprocess = {**base().preprocess, 'resize': method}
    encoded = encode(picture(*shape), 'PNG')
    expected = window_of_the_whole(encoded, size, preprocess)
    # Positions are rounded to float32. The error is 1e-4 of a pixel at 2000 px from the edge.
    np.testing.assert_allclose(load(tmp_path, encoded, size, resize=method), expected, atol=2e-3)
    np.testing.assert_allclose(evaluated(encoded, size, preprocess), expected, atol=2e-3)


def test_a_thin_image_takes_little_memory(tmp_path):
    """The whole would be 256 x 16,768,000 pixels, 51 GB."""
    encoded = encode(Image.new('RGB', (65_500, 1), (0, 51, 255)), 'JPEG', quality=100)
    assert len(encoded) < 20_000
    for image in (
        load(tmp_path, encoded, (224, 224)),
        evaluated(encoded, (224, 224), base().preprocess),
    ):
        np.testing.assert_allclose(image[100, 100], [-1, -0.6, 1], atol=0.02)


def png_of(width, height):
    """A PNG file whose header states a size, but whose pixels are few."""
    header = b'IHDR' + width.to_bytes(4, 'big') + height.to_bytes(4, 'big') + b'\x08\2\0\0\0'
    plain = encode(picture(8, 8), 'PNG')
    return plain[:12] + header + zlib.crc32(header).to_bytes(4, 'big') + plain[33:]


@pytest.mark.parametrize(
    ('width', 'height'), [(12_000, 12_000), (65_536, 1), (1, 2**31 - 1), (30_000, 30_000)]
)
def test_too_many_pixels_are_refused_before_decoding(width, height, tmp_path):
    message = 'more than the limit of 120,000,000 pixels for decoding, or of 65,535 on a side'
    bmp = encode(picture(8, 8), 'BMP')
    for encoded in (
        png_of(width, height),
        bmp[:18] + np.array([width, height], '<u4').tobytes() + bmp[26:],
    ):
        with refused('unreadable', file=tmp_path / 'file') as caught:
            load(tmp_path, encoded)
        assert message in str(caught.value)
        with pytest.raises(tf.errors.OpError, match=message):
            decode_in_pipeline(encoded)


def test_the_limits_allow_the_largest_camera(monkeypatch):
    assert images.MAX_PIXELS > 12_032 * 9_024  # 108 megapixels
    encoded = [encode(picture(8, 9), kind) for kind in ('PNG', 'JPEG', 'WEBP')]
    monkeypatch.setattr(images, 'MAX_PIXELS', 71)
    for file in encoded:
        with pytest.raises(ValueError, match='9 x 8 is more than the limit'):
            images.decode(file)
        with pytest.raises(tf.errors.OpError, match='9 x 8 is more than the limit'):
            tf.function(preprocess.decode_image)(tf.constant(file))
    monkeypatch.setattr(images, 'MAX_PIXELS', 72)
    for file in encoded:
        assert images.decode(file).shape == (8, 9, 3)
        assert tf.function(preprocess.decode_image)(tf.constant(file)).shape == (8, 9, 3)


def mutated(encoded, random):
    """The file with a few bytes changed, removed or doubled."""
    data = bytearray(encoded)
    at = random.integers(0, len(encoded), 8)
    kind = random.integers(5)
    if kind == 0:
        del data[at[0] :]
    elif kind == 1:
        del data[min(at[:2]) : max(at[:2])]
    elif kind == 2:
        data[at[0] : at[0]] = data[min(at[1:3]) : max(at[1:3])]
    else:  # changes headers more often than pixels
        for where, value in zip(at, random.integers(256, size=8), strict=True):
            data[where % (60 if kind == 3 else len(data))] = value
    return bytes(data)


def test_damaged_files_decode_or_count_as_broken():
    """No decoder raises another error for a few hundred files, and none needs much memory."""
    random = np.random.default_rng(15)
    begin = time.monotonic()
    num_decoded = 0
    num_broken = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _, encoded in FILES:
        for damaged in [mutated(encoded, random) for _ in range(6)]:
            try:
                assert images.decode(damaged).dtype == np.uint8
                num_decoded += 1
            except ValueError:
                num_broken += 1
            with contextlib.suppress(tf.errors.OpError):
                decode_in_pipeline(damaged)
    assert num_decoded > 50
    assert num_broken > 150
    assert time.monotonic() - begin < 60  # seconds; two seconds on an idle machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6  # KB


def test_a_damaged_orientation_leaves_the_image_as_it_is():
    random = np.random.default_rng(3)
    for kind in ('JPEG', 'PNG'):
        encoded = encode(picture(16, 24), kind, exif=oriented(6))
        exif = encoded.lower().index(b'exif')
        for _ in range(40):
            damaged = bytearray(encoded)
            for at in random.integers(exif + 8, exif + 32, 3):
                damaged[at] = random.integers(256)
            try:
                pixels = images.decode(bytes(damaged))
            except ValueError:  # the damage also affects other data, such as the checksum of a PNG
                continue
            assert pixels.shape in ((24, 16, 3), (16, 24, 3))
            np.testing.assert_array_equal(decode_in_pipeline(bytes(damaged)), pixels)
