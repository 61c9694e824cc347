"""Cropping, resizing and augmentation compared with Pillow and NumPy.

Decoding is tested in images_test.py.
"""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.support.images import encode, evaluated, picture
from vit_jax.data import order, preprocess, resizing


def settings(
    resize='bilinear',
    crop_ratio=1.0,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    fit='cover',
    antialias=True,
):
    return {
        'fit': fit,
        'crop_ratio': crop_ratio,
        'resize': resize,
        'antialias': antialias,
        'mean': mean,
        'std': std,
    }


def train_image(pixels, size, **augment):
    """The function from keys to the augmented image."""
    encoded = encode(Image.fromarray(pixels), 'PNG')
    augment = {
        'crop': 'none',
        'min_area': 0.05,
        'pad': 0,
        'flip': False,
        'resize': 'same',
        'randaugment': {'num_ops': 0},
        **augment,
    }
    return tf.function(
        lambda keys: preprocess.train_image(
            tf.constant(encoded), keys, size, augment, settings(), tf.constant(False)
        )[0]
    )


def keys(position, rows=1):
    return order.augment_bits(7, tf.constant(position, tf.int64), rows)


def pillow_eval(pixels, size, config):
    """Resizes the short side to size / crop_ratio, crops the middle and normalises, in floats."""
    height, width = pixels.shape[:2]
    target = [round(side / config['crop_ratio']) for side in size]
    scale = max(target[0] / height, target[1] / width)
    new = [int(np.floor(side * scale + 0.5 + 1e-9)) for side in (height, width)]
    filters = {'bilinear': Image.BILINEAR, 'bicubic': Image.BICUBIC}
    channels = [
        Image.fromarray(pixels[..., c].astype(np.float32)).resize(
            (new[1], new[0]), filters[config['resize']]
        )
        for c in range(3)
    ]
    top = (new[0] - size[0]) // 2
    left = (new[1] - size[1]) // 2
    image = np.stack(channels, -1)[top : top + size[0], left : left + size[1]]
    return (image / 255 - np.array(config['mean'])) / np.array(config['std'])


@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
@pytest.mark.parametrize(
    ('source', 'size', 'ratio'),
    [((90, 61), (32, 32), 0.875), ((50, 77), (24, 40), 0.9), ((20, 31), (48, 48), 1.0)],
)
def test_evaluation_equals_pillow_in_float(method, source, size, ratio):
    config = settings(method, ratio, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    encoded = encode(picture(*source), 'PNG')
    image = evaluated(encoded, size, config)
    assert image.shape == (*size, 3)
    assert image.dtype == tf.float32
    expected = pillow_eval(np.asarray(picture(*source)), size, config)
    np.testing.assert_allclose(image, expected, atol=2e-5)


def test_training_may_use_another_filter_than_evaluation():
    pixels = np.asarray(picture(40, 30))
    by_area = train_image(pixels, (16, 12), resize='area')(keys(0)[0])
    np.testing.assert_array_equal(by_area, tf.image.resize(pixels, (16, 12), 'area'))
    same, bilinear = (
        train_image(pixels, (16, 12), resize=name)(keys(0)[0]) for name in ('same', 'bilinear')
    )
    np.testing.assert_array_equal(same, bilinear)
    assert np.abs(same - by_area).max() > 1


def test_image_of_the_right_size_is_only_normalised():
    pixels = np.asarray(picture(32, 24))
    encoded = encode(picture(32, 24), 'PNG')
    image = evaluated(encoded, (32, 24), settings('bicubic'))
    expected = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    np.testing.assert_array_equal(image, expected)


def test_pad_crops_are_uniform_windows_of_the_padded_image():
    pixels = np.asarray(picture(6, 5))
    padded = np.pad(pixels, [(2, 2), (2, 2), (0, 0)], mode='symmetric').astype(np.float32)
    windows = {}
    for y in range(5):
        for x in range(5):
            window = padded[y : y + 6, x : x + 5]
            windows[window.tobytes()] = (y, x, 0)
            windows[np.ascontiguousarray(window[:, ::-1]).tobytes()] = (y, x, 1)
    augmented = train_image(pixels, (6, 5), crop='pad', pad=2, flip=True)
    places = [windows[augmented(row).numpy().tobytes()] for row in keys(0, 600).numpy()]
    counts = np.zeros((5, 5, 2), int)
    np.add.at(counts, tuple(np.transpose(places)), 1)
    # 600 draws in 50 cells: chi-square with 49 degrees of freedom is below 86 except for 1 in 1000.
    assert ((counts - 12) ** 2 / 12).sum() < 86


def test_resize_crops_are_uniform_windows_of_the_squashed_image():
    """BiT crops 128 px of 160; the test has an eighth of this size."""
    pixels = np.asarray(picture(30, 24))
    larger = preprocess.resize(tf.constant(pixels), (20, 20), settings()).numpy()
    windows = {larger[y : y + 16, x : x + 16].tobytes(): (y, x) for y in range(5) for x in range(5)}
    augmented = train_image(pixels, (16, 16), crop='resize', crop_ratio=0.8)
    places = [windows[augmented(row).numpy().tobytes()] for row in keys(0, 300).numpy()]
    counts = np.zeros((5, 5), int)
    np.add.at(counts, tuple(np.transpose(places)), 1)
    # 300 draws in 25 cells: chi-square with 24 degrees of freedom is below 51 except for 1 in 1000.
    assert ((counts - 12) ** 2 / 12).sum() < 51


def test_inception_crops_have_the_stated_areas_and_aspect_ratios():
    # Pixels are their own coordinates, so the slope of a crop reveals its size.
    y, x = np.mgrid[:200, :200]
    crop = train_image(
        np.stack([y, x, x], -1).astype(np.uint8), (8, 8), crop='inception', min_area=0.25
    )
    sizes = []
    for row in keys(0, 200).numpy():
        image = crop(row).numpy()
        # Samples are 1/8 of the side apart. Near the border, half of the filter is missing.
        slope = (image[5, 2, 0] - image[2, 2, 0], image[2, 5, 1] - image[2, 2, 1])
        sizes.append(np.array(slope) / 3 * 8)
    height, width = np.transpose(sizes)
    area = height * width / 200**2
    aspect = width / height
    assert 0.24 < area.min() < 0.3
    assert 0.85 < area.max() <= 1.01
    assert 0.73 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 1.36


def test_crop_none_only_resizes():
    pixels = np.asarray(picture(40, 30))
    expected = tf.image.resize(pixels, (16, 12), 'bilinear', antialias=True)
    np.testing.assert_array_equal(train_image(pixels, (16, 12))(keys(0)[0]), expected)


def test_resize_supports_the_methods_of_prediction():
    for method in resizing.RESAMPLING:
        small = preprocess.resize(
            tf.constant(np.asarray(picture(40, 30))), (16, 12), settings(method)
        )
        assert small.shape == (16, 12, 3)


@pytest.mark.parametrize(
    'file',
    [
        dict(subsampling=0),
        dict(subsampling=1),
        dict(subsampling=2),
        dict(subsampling=2, progressive=True),
        dict(subsampling=2, restart_marker_blocks=3),
    ],
    ids=str,
)
def test_a_part_has_the_pixels_of_the_whole(file):
    """Parts have any place and size, including borders of the image and of JPEG blocks."""
    encoded = encode(picture(53, 71), 'JPEG', quality=85, **file)
    image = preprocess.decode_image(encoded).numpy()
    rng = np.random.default_rng(0)
    for _ in range(40):
        top, left = map(int, rng.integers(0, (53, 71)))
        height, width = map(int, rng.integers(1, (54 - top, 72 - left)))
        slices = [
            preprocess.decode_part(
                encoded,
                lambda shape, box=(top, left, 0, height, width, -1): tf.split(box, 2),
                tf.constant(intact),
            )
            for intact in (False, True)
        ]
        for part, intact in slices:
            assert intact
            np.testing.assert_array_equal(part, image[top : top + height, left : left + width])


@pytest.mark.parametrize(('height', 'width'), [(1, 1), (2, 3), (7, 5), (5, 8), (300, 257)])
def test_plain_bmp_files_are_read_without_pillow(height, width, monkeypatch):
    """Rows in these files begin at multiples of four bytes, and the last row comes first."""
    image = picture(height, width)

    def must_not_be_called(encoded):
        raise AssertionError

    monkeypatch.setattr(preprocess.images, 'decode', must_not_be_called)
    pixels = tf.function(preprocess.decode_image)(tf.constant(encode(image, 'BMP')))
    np.testing.assert_array_equal(pixels, image)
    # A BMP with a palette needs Pillow.
    with pytest.raises(tf.errors.OpError, match='AssertionError'):
        tf.function(preprocess.decode_image)(tf.constant(encode(image.convert('P'), 'BMP')))


def test_a_part_is_decoded_alone_only_if_the_whole_was_decoded_before():
    """This detects a JPEG that is damaged below the crop."""
    damaged = encode(picture(64, 64), 'JPEG')[:-400]

    def box(shape):
        return tf.split((0, 0, 0, 8, 8, -1), 2)

    with pytest.raises(tf.errors.InvalidArgumentError):
        preprocess.decode_part(damaged, box, tf.constant(False))
    assert preprocess.decode_part(damaged, box, tf.constant(True))[0].shape == (8, 8, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    for other in (
        encode(picture(64, 64), 'PNG'),
        encode(picture(64, 64), 'BMP'),
        encode(picture(64, 64), 'JPEG', exif=exif),
    ):
        decode_part = tf.function(preprocess.decode_part)
        _, intact = decode_part(tf.constant(other), box, tf.constant(False))
        assert not intact


@pytest.mark.parametrize(
    ('mean', 'std'),
    [
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ((0.5,) * 3, (0.5,) * 3),
        ((0.4,) * 3, (0.229, 0.224, 0.225)),
        ((0.485, 0.456, 0.406), (0.25, 0.5, 1.0)),
    ],
)
def test_normalised_pixels_equal_the_formula_bit_for_bit(mean, std):
    """This keeps the pixels of older runs, for single images and for batches."""
    fields = {'mean': mean, 'std': std}
    pixels = np.random.default_rng(0).uniform(-3, 258, (2, 5, 7, 3)).astype(np.float32)
    expected = (pixels / np.float32(255) - np.float32(mean)) / np.float32(std)
    np.testing.assert_array_equal(preprocess.normalise(pixels, fields), expected)
    np.testing.assert_array_equal(preprocess.normalise(pixels[0], fields), expected[0])


@pytest.mark.parametrize('dtype', [np.uint8, np.float32])
@pytest.mark.parametrize('flip', [True, False])
def test_images_are_mirrored_or_unchanged(flip, dtype):
    for shape in ((5, 7, 3), (1, 1, 3), (4, 3, 3)):
        image = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        np.testing.assert_array_equal(
            preprocess.flipped(image, tf.constant(flip)), image[:, ::-1] if flip else image
        )
