"""HEIC photos: recognised, decoded by pillow-heif if it is installed, never skipped silently."""

import sys

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tests.support import interop
from tests.support.batches import encoded, write_directory
from tests.support.errors import refused
from tests.support.images import encode, heic, oriented, picture
from vit_jax.config import base
from vit_jax.data import heic as heic_photos
from vit_jax.data import images, preprocess, sources
from vit_jax.data.photo_table import Row, write
from vit_jax.fitting import scan

# The beginning of a photo of a phone; its main brand is not always heic.
BEGIN = b'\0\0\0\x18ftypmif1\0\0\0\0mif1heic' + bytes(40)
decode_in_pipeline = tf.function(
    preprocess.decode_image, input_signature=[tf.TensorSpec([], tf.string)]
)


@pytest.fixture
def without_decoder(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pillow_heif', None)
    assert not heic_photos.is_installed()


@pytest.fixture
def _with_decoder():
    interop.require('pillow_heif')


needs_decoder = pytest.mark.usefixtures('_with_decoder')


def test_the_first_bytes_tell_what_is_heic():
    assert heic_photos.is_heic(BEGIN)
    assert heic_photos.is_heic(b'\0\0\0\x10ftypheix\0\0\0\0')
    others = [encode(picture(8, 8), kind) for kind in images.FORMATS]
    for other in (b'', BEGIN[:8], b'\0\0\0\x10ftypmif1\0\0\0\0heic', *others):
        assert not heic_photos.is_heic(other)
    assert images.is_image('IMG_1.HEIC')
    assert not images.is_image('IMG_1.HEIC', images.SUFFIXES_WITHOUT_HEIC)


@pytest.mark.usefixtures('without_decoder')
def test_every_reader_says_how_to_install_the_decoder(tmp_path):
    """Also for a photo that has been given the ending of another format."""
    path = tmp_path / 'IMG_1.jpg'
    path.write_bytes(BEGIN)
    with refused('unreadable', file=path) as caught:
        images.load(str(path), (8, 8), base().preprocess)
    reason = scan.look_at(str(path)).problem
    assert heic_photos.HOW_TO_INSTALL in reason
    assert reason in str(caught.value)
    with pytest.raises(tf.errors.OpError, match='pillow-heif'):
        decode_in_pipeline(BEGIN)


@pytest.mark.usefixtures('without_decoder')
def test_a_directory_with_photos_that_cannot_be_decoded_is_refused(tmp_path):
    root = write_directory(tmp_path, count=6).name
    photo = tmp_path / 'train' / 'a' / 'IMG_1.HEIC'
    photo.write_bytes(BEGIN)
    with refused('missing', field='dataset.heic', file=photo, value=1) as caught:
        sources.open_source(root, 'train')
    assert heic_photos.HOW_TO_INSTALL in str(caught.value)


@pytest.mark.usefixtures('without_decoder')
def test_photos_of_a_table_that_cannot_be_decoded_are_refused(tmp_path):
    photo = tmp_path / 'IMG_1.heic'
    photo.write_bytes(BEGIN)
    write(str(tmp_path / 'photos.csv'), [Row(str(photo), ('a',))], multi_label=False)
    with refused('missing', field='dataset.heic', file=photo, value=1):
        sources.open_source(str(tmp_path / 'photos.csv'), 'train')


@pytest.mark.parametrize('has_table', [False, True])
def test_a_directory_can_leave_its_heic_photos_out(has_table, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(heic_photos, 'is_installed', lambda: True)
    folder = tmp_path / 'train'
    (folder if has_table else folder / 'a').mkdir(parents=True)
    for name, content in {'1.png': encoded(1), '2.heic': BEGIN}.items():
        (folder / ('' if has_table else 'a') / name).write_bytes(content)
    if has_table:
        (folder / 'labels.csv').write_text('file,label\n1.png,a\n')
        with refused('missing', file=folder / 'labels.csv', value=['2.heic']):
            sources.open_source(str(tmp_path), 'train')
    else:
        assert sources.open_source(str(tmp_path), 'train').num_examples == 2
    source = sources.open_source(str(tmp_path), 'train', with_heic=False)
    assert [source.name_of(index)[-5:] for index in range(source.num_examples)] == ['1.png']
    assert has_table or 'skipped: 1 .heic' in caplog.text


@needs_decoder
@pytest.mark.parametrize('mode', ['RGB', 'L', 'RGBA', 'LA'])
def test_a_lossless_photo_keeps_its_pixels_and_drops_transparency(mode):
    image = picture(46, 62, mode)
    photo = heic(image)
    np.testing.assert_array_equal(images.decode(photo), np.asarray(image.convert('RGB')))
    np.testing.assert_array_equal(decode_in_pipeline(photo), images.decode(photo))


@needs_decoder
@pytest.mark.parametrize('orientation', range(1, 9))
def test_photos_are_upright(orientation):
    image = picture(16, 24)
    image.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(image))
    photo = heic(picture(16, 24), exif=oriented(orientation).tobytes())
    np.testing.assert_array_equal(images.decode(photo), expected)
    np.testing.assert_array_equal(decode_in_pipeline(photo), expected)


@needs_decoder
def test_sixteen_bits_of_grey_keep_the_upper_eight():
    """The encoder keeps twelve of them."""
    image = picture(40, 40, 'I;16')
    expected = np.repeat((np.asarray(image) >> 8)[..., None], 3, -1)
    np.testing.assert_allclose(images.decode(heic(image)), expected, atol=1)


@needs_decoder
def test_damaged_photos_are_broken_for_both(tmp_path):
    photo = heic(picture(45, 61))
    for length in (1, 7, 20, 100, len(photo) // 2, int(len(photo) * 0.95)):
        (tmp_path / 'photo.heic').write_bytes(photo[:length])
        with refused('unreadable', file=tmp_path / 'photo.heic'):
            images.load(str(tmp_path / 'photo.heic'), (8, 8), base().preprocess)
        with pytest.raises(tf.errors.OpError):
            decode_in_pipeline(photo[:length])


@needs_decoder
def test_too_many_pixels_are_refused_before_decoding(monkeypatch):
    photo = heic(picture(8, 9))
    monkeypatch.setattr(images, 'MAX_PIXELS', 71)
    with pytest.raises(ValueError, match='9 x 8 is more than the limit'):
        images.decode(photo)
    monkeypatch.setattr(images, 'MAX_PIXELS', 72)
    assert images.decode(photo).shape == (8, 9, 3)


@needs_decoder
def test_decoding_does_not_change_what_pillow_opens():
    images.decode(heic(picture(8, 8)))
    assert 'HEIF' not in Image.OPEN
