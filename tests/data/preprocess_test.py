"""Decoding and cropping against Pillow and NumPy."""

import io

import ml_collections
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from vit_jax.data import order, preprocess


def settings(resize='bilinear', crop_ratio=1.0, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)):
    return ml_collections.ConfigDict(
        {'resize': resize, 'crop_ratio': crop_ratio, 'mean': mean, 'std': std}
    )


def train_config(size, **augment):
    augment = {'crop': 'none', 'min_area': 0.05, 'pad': 0, 'flip': False, **augment}
    return ml_collections.ConfigDict(
        {'image_size': size, 'augment': augment, 'preprocess': settings()}
    )


def picture(height, width, mode='RGB', seed=0):
    """A smooth picture with some noise, so that JPEG has all kinds of coefficients."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(9 * x + 5 * y * k + k) for k in (1, 2, 3)]
    pixels = 127 + 90 * np.stack(waves, -1) + random.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).convert(mode)


def encode(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pillow(encoded):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert('RGB'))


decode = tf.function(preprocess.decode_image, input_signature=[tf.TensorSpec([], tf.string)])


@pytest.mark.parametrize(
    ('kind', 'mode', 'options'),
    [
        ('JPEG', 'RGB', {'quality': 90}),
        ('JPEG', 'RGB', {'quality': 50, 'subsampling': 2}),
        ('JPEG', 'RGB', {'progressive': True}),
        ('JPEG', 'L', {}),
        ('PNG', 'RGB', {}),
        ('PNG', 'RGBA', {}),
        ('PNG', 'P', {}),
        ('PNG', 'L', {}),
        ('BMP', 'RGB', {}),
        ('BMP', 'P', {}),
        ('GIF', 'P', {}),
    ],
)
def test_decoding_equals_pillow(kind, mode, options):
    encoded = encode(picture(45, 61, mode), kind, **options)
    np.testing.assert_array_equal(decode(encoded), pillow(encoded))


def test_first_frame_of_a_gif():
    frames = [picture(20, 30, 'P', seed) for seed in (1, 2)]
    encoded = encode(frames[0], 'GIF', save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(decode(encoded), np.asarray(frames[0].convert('RGB')))


def test_16_bit_png_keeps_the_high_byte():
    values = np.random.default_rng(0).integers(0, 2**16, (9, 7)).astype(np.uint16)
    encoded = encode(Image.fromarray(values), 'PNG')
    np.testing.assert_array_equal(decode(encoded), np.stack([values >> 8] * 3, -1))


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('kind', ['JPEG', 'PNG'])
def test_exif_orientation_equals_pillow(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(picture(16, 24), kind, exif=exif)
    np.testing.assert_array_equal(decode(encoded), pillow(encoded))


def test_unreadable_exif_leaves_the_image_as_it_is():
    plain = encode(picture(16, 24), 'JPEG')
    segment = b'\xff\xe1\x00\x10Exif\x00\x00garbage!'
    np.testing.assert_array_equal(decode(plain[:2] + segment + plain[2:]), pillow(plain))


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'GIF', 'BMP'])
@pytest.mark.parametrize('part', [0.0, 0.02, 0.5, 0.95])
def test_a_file_cut_short_is_an_error(kind, part):
    encoded = encode(picture(64, 48), kind)
    with pytest.raises(tf.errors.OpError):
        decode(encoded[: int(len(encoded) * part)])


def test_other_formats_are_an_error():
    for encoded in (b'', b'no image', encode(picture(8, 8), 'TIFF'), encode(picture(8, 8), 'WEBP')):
        with pytest.raises(tf.errors.OpError):
            decode(encoded)


def pillow_eval(pixels, size, config):
    """Short side to size / crop_ratio, central crop, normalise; channels as floats."""
    height, width = pixels.shape[:2]
    target = [round(side / config.crop_ratio) for side in size]
    scale = max(target[0] / height, target[1] / width)
    new = [int(np.floor(side * scale + 0.5 + 1e-9)) for side in (height, width)]
    filters = {'bilinear': Image.BILINEAR, 'bicubic': Image.BICUBIC}
    channels = [
        Image.fromarray(pixels[..., c].astype(np.float32)).resize(
            (new[1], new[0]), filters[config.resize]
        )
        for c in range(3)
    ]
    top, left = (new[0] - size[0]) // 2, (new[1] - size[1]) // 2
    image = np.stack(channels, -1)[top : top + size[0], left : left + size[1]]
    return (image / 255 - np.array(config.mean)) / np.array(config.std)


@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
@pytest.mark.parametrize(
    ('source', 'size', 'ratio'),
    [((90, 61), (32, 32), 0.875), ((50, 77), (24, 40), 0.9), ((20, 31), (48, 48), 1.0)],
)
def test_evaluation_equals_pillow_in_float(method, source, size, ratio):
    config = settings(method, ratio, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    encoded = encode(picture(*source), 'PNG')
    image = preprocess.preprocess_eval(encoded, size, config)
    assert image.shape == (*size, 3)
    assert image.dtype == tf.float32
    np.testing.assert_allclose(image, pillow_eval(pillow(encoded), size, config), atol=2e-5)


def test_image_of_the_right_size_is_only_normalised():
    pixels = np.asarray(picture(32, 24))
    encoded = encode(picture(32, 24), 'PNG')
    image = preprocess.preprocess_eval(encoded, (32, 24), settings('bicubic'))
    expected = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    np.testing.assert_array_equal(image, expected)


def keys(position, rows=1):
    return order.augment_bits(7, tf.constant(position, tf.int64), rows)


def test_keys_of_a_position_do_not_depend_on_the_batch():
    rows = keys(1000, 50).numpy()
    for i in (0, 1, 17, 49):
        np.testing.assert_array_equal(keys(1000 + i)[0], rows[i])
    assert len(np.unique(rows)) == rows.size


def test_pad_crop_and_flip_are_windows_of_the_padded_image():
    config = train_config((6, 5), crop='pad', pad=2, flip=True)
    pixels = np.asarray(picture(6, 5))
    padded = np.pad(pixels, [(2, 2), (2, 2), (0, 0)], mode='symmetric').astype(np.float32)
    windows = {}
    for y in range(5):
        for x in range(5):
            window = padded[y : y + 6, x : x + 5]
            windows[window.tobytes()] = (y, x, 0)
            windows[np.ascontiguousarray(window[:, ::-1]).tobytes()] = (y, x, 1)
    augment = tf.function(lambda seeds: preprocess.augment(tf.constant(pixels), seeds, config))
    seen = [windows[augment(seeds).numpy().tobytes()] for seeds in keys(0, 600).numpy()]
    counts = np.zeros((5, 5, 2), int)
    np.add.at(counts, tuple(np.transpose(seen)), 1)
    # 600 draws over 50 cells: chi-square with 49 degrees of freedom is below 86 but for 1 in 1000.
    assert ((counts - 12) ** 2 / 12).sum() < 86


def test_inception_crop_has_the_area_and_shape_it_should():
    config = train_config((8, 8), crop='inception', min_area=0.25)
    # Pixels are their own coordinates, so that the slope of a crop shows how large it was.
    y, x = np.mgrid[:200, :200]
    ramp = tf.constant(np.stack([y, x, x], -1), tf.uint8)
    crop = tf.function(lambda seed: preprocess.crop_for_training(ramp, seed, config))
    sizes = []
    for seeds in keys(0, 200).numpy():
        image = crop(seeds[0]).numpy()
        # Samples lie 1/8 of the side apart; those near the border see only half the filter.
        slope = (image[5, 2, 0] - image[2, 2, 0], image[2, 5, 1] - image[2, 2, 1])
        sizes.append(np.array(slope) / 3 * 8)
    height, width = np.transpose(sizes)
    area, aspect = height * width / 200**2, width / height
    assert 0.24 < area.min() < 0.3
    assert 0.85 < area.max() <= 1.01
    assert 0.73 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.36


def test_no_crop_only_resizes():
    pixels = np.asarray(picture(40, 30))
    image = preprocess.augment(tf.constant(pixels), keys(0)[0], train_config((16, 12)))
    expected = tf.image.resize(pixels, (16, 12), 'bilinear', antialias=True)
    np.testing.assert_array_equal(image, expected)
