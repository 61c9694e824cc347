"""Inference without TensorFlow sees the pixels that training and evaluation see."""

import importlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.config import base
from vit_jax.data import images
from vit_jax.data.preprocess import preprocess_eval
from vit_jax.errors import UserError


def picture(height, width, channels, seed=0):
    """Smooth and with noise, uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    smooth = 120 + 60 * np.sin(x[..., None] / 7 + np.arange(channels)) * np.cos(y[..., None] / 9)
    return (smooth + rng.integers(-30, 30, smooth.shape)).clip(0, 255).astype(np.uint8)


def write(path, mode, size=(61, 83), exif=None):
    channels = {'L': 1, 'RGB': 3, 'RGBA': 4, 'CMYK': 4, 'P': 3}[mode]
    array = picture(*size, channels)
    image = Image.fromarray(array[..., 0] if mode == 'L' else array,
                            mode=None if mode == 'P' else mode)
    image = image.quantize(64) if mode == 'P' else image
    options = {'exif': exif} if exif else {}
    image.save(path, **options)
    return path


@pytest.mark.parametrize('method', ['bilinear', 'bicubic', 'lanczos3'])
@pytest.mark.parametrize(('image_size', 'crop_ratio'), [((32, 32), 0.875), ((96, 64), 1.0)])
def test_equals_the_training_side_s(method, image_size, crop_ratio, tmp_path):
    path = write(tmp_path / 'a.png', 'RGB')
    preprocess = base().preprocess
    preprocess.update(resize=method, crop_ratio=crop_ratio, mean=(0.4, 0.5, 0.6))
    expected = preprocess_eval(path.read_bytes(), image_size, preprocess).numpy()
    np.testing.assert_allclose(images.load(str(path), image_size, preprocess), expected, atol=2e-5)


@pytest.mark.parametrize(('name', 'mode'), [
    ('a.jpg', 'RGB'), ('a.jpg', 'L'), ('a.png', 'RGBA'), ('a.png', 'P'), ('a.gif', 'P'),
    ('a.bmp', 'RGB')])
def test_every_kind_of_file(name, mode, tmp_path):
    path = write(tmp_path / name, mode)
    expected = preprocess_eval(path.read_bytes(), (48, 48), base().preprocess).numpy()
    np.testing.assert_allclose(images.load(str(path), (48, 48), base().preprocess), expected,
                               atol=2e-5)


@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_orientation(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path / 'a.jpg', 'RGB', exif=exif)
    expected = preprocess_eval(path.read_bytes(), (48, 48), base().preprocess).numpy()
    np.testing.assert_allclose(images.load(str(path), (48, 48), base().preprocess), expected,
                               atol=2e-5)


def test_cmyk_and_sixteen_bits(tmp_path):
    """The inks of a CMYK JPEG become the colours that Pillow makes of them."""
    path = write(tmp_path / 'a.jpg', 'CMYK')
    rgb = np.asarray(Image.open(path).convert('RGB'))
    Image.fromarray(rgb).save(tmp_path / 'rgb.png')
    grey = picture(40, 40, 1)[..., 0]
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / 'deep.png')
    Image.fromarray(grey).save(tmp_path / 'grey.png')
    for one, other in [('a.jpg', 'rgb.png'), ('deep.png', 'grey.png')]:
        np.testing.assert_array_equal(*(
            images.load(str(tmp_path / name), (32, 32), base().preprocess)
            for name in (one, other)))


def test_a_pillow_without_avif(tmp_path, monkeypatch):
    path = write(tmp_path / 'a.jpg', 'RGB')
    with monkeypatch.context() as patch:
        patch.setattr(Image, 'OPEN', {k: x for k, x in Image.OPEN.items() if k != 'AVIF'})
        importlib.reload(images)
        assert images.load(str(path), (8, 8), base().preprocess).shape == (8, 8, 3)
        assert 'AVIF' not in images.FORMATS
    importlib.reload(images)


def test_what_is_no_image(tmp_path):
    path = write(tmp_path / 'a.jpg', 'RGB')
    whole = path.read_bytes()
    (tmp_path / 'cut.jpg').write_bytes(whole[:len(whole) // 2])
    (tmp_path / 'text.jpg').write_text('not an image')
    Image.open(path).save(tmp_path / 'page.eps')
    Image.new('1', (1, 1)).save(tmp_path / 'bomb.bmp')
    bomb = bytearray((tmp_path / 'bomb.bmp').read_bytes())
    bomb[18:26] = np.array([30_000, 30_000], '<i4').tobytes()  # width and height
    (tmp_path / 'bomb.bmp').write_bytes(bomb)
    for name, message in [('cut.jpg', 'cut.jpg. cannot be read'),
                          ('text.jpg', 'is no image of AVIF,'),
                          ('page.eps', 'is no image of'), ('bomb.bmp', 'cannot be read: .*bomb'),
                          ('gone.jpg', 'there is no image')]:
        with pytest.raises(UserError, match=message):
            images.load(str(tmp_path / name), (32, 32), base().preprocess)
