"""Forty photos, real and drawn, preprocessed as in five code bases."""

import math

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.support import interop
from tests.support.images import encode, evaluated
from tests.support.photos import needs_photos, photos, photos_with_edges
from vit_jax.data import order, preprocess, resizing

SIDE = 224
pytestmark = pytest.mark.slow
FILTERS = {'bilinear': Image.BILINEAR, 'bicubic': Image.BICUBIC}


def vision_transformer(image, method):
    """input_pipeline.py: tf.image.resize of the whole image."""
    return tf.image.resize(np.asarray(image), (SIDE, SIDE), method).numpy()


def big_vision(image, method):
    """pp_ops.resize_small(256), central_crop(224)."""
    pixels = np.asarray(image)
    scale = 256 / min(pixels.shape[:2])
    new = [int(np.round(side * scale)) for side in pixels.shape[:2]]
    top, left = ((side - SIDE) // 2 for side in new)
    return tf.image.resize(pixels, new, method).numpy()[top : top + SIDE, left : left + SIDE]


def timm(image, method):
    """timm.data.transforms_imagenet_eval with crop_pct 0.9: torchvision's rules, on Pillow."""
    target = math.floor(SIDE / 0.9)
    short, long = sorted(image.size)
    other = int(target * long / short)
    image = image.resize(
        (other, target) if image.width > image.height else (target, other), FILTERS[method]
    )
    left, top = (int(round((side - SIDE) / 2.0)) for side in image.size)
    return np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), float)


def torchvision(image, method):
    """The classes of torchvision itself."""
    interop.require('torchvision')
    from torchvision import transforms

    chain = transforms.Compose(
        [
            transforms.Resize(256, transforms.InterpolationMode(method)),
            transforms.CenterCrop(SIDE),
        ]
    )
    return np.asarray(chain(image), float)


def transformers_vit(image, method):
    """ViTImageProcessor itself, which squashes the whole image."""
    return _processed('ViTImageProcessor', image, dict(height=SIDE, width=SIDE), method)


def transformers_clip(image, method):
    """CLIPImageProcessor itself, which resizes the short side and crops the middle."""
    return _processed(
        'CLIPImageProcessor',
        image,
        dict(shortest_edge=256),
        method,
        crop_size=dict(height=SIDE, width=SIDE),
    )


def _processed(name, image, size, method, **options):
    transformers = interop.require('transformers')
    # transformers has two backends; every installation has the one on Pillow.
    kind = getattr(transformers, f'{name}Pil', None) or getattr(transformers, name)
    processor = kind(
        size=size, resample=FILTERS[method], do_normalize=False, do_rescale=False, **options
    )
    return processor(image, return_tensors='np')['pixel_values'][0].transpose(1, 2, 0).astype(float)


PILLOW = dict(antialias=True, uint8_resize=True)
# The fields of `preprocess` for each code base.
CHAINS = {
    vision_transformer: dict(fit='squash', crop_ratio=1.0, antialias=False, uint8_resize=False),
    big_vision: dict(fit='cover', crop_ratio=0.875, antialias=False, uint8_resize=False),
    timm: dict(fit='torchvision', crop_ratio=0.9, **PILLOW),
    torchvision: dict(fit='torchvision', crop_ratio=0.875, **PILLOW),
    transformers_vit: dict(fit='squash', crop_ratio=1.0, **PILLOW),
    transformers_clip: dict(fit='transformers', crop_ratio=0.875, **PILLOW),
}


@pytest.mark.parametrize('given', [pytest.param(photos, marks=needs_photos), photos_with_edges])
@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
@pytest.mark.parametrize('chain', CHAINS, ids=lambda chain: chain.__name__)
def test_evaluation_and_prediction_have_the_pixels_of_the_code_base(chain, method, given):
    """All pixels agree within one grey level, and no value is clipped before the comparison."""
    settings = CHAINS[chain] | dict(resize=method, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    for number, photo in enumerate(given()):
        theirs = chain(photo, method)
        assert theirs.shape == (SIDE, SIDE, 3)
        for ours in (
            evaluated(encode(photo, 'PNG'), (SIDE, SIDE), settings).numpy(),
            resizing.resize_and_central_crop(np.asarray(photo), (SIDE, SIDE), settings),
        ):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1.001, err_msg=str(number))


@pytest.mark.parametrize('given', [pytest.param(photos, marks=needs_photos), photos_with_edges])
@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
def test_training_has_the_pixels_of_torchvision(given, method):
    """The pixels of a random box, resized as RandomResizedCrop does, and flipped."""
    interop.require('torchvision')
    from torchvision.transforms import functional

    for number, photo in enumerate(given()):
        theirs, ours = [
            train(photo, number, dict(resize=method, **PILLOW), resized)
            for resized in (
                lambda part: np.asarray(
                    functional.resize(
                        Image.fromarray(part),
                        [SIDE, SIDE],
                        functional.InterpolationMode(method),
                    ),
                    float,
                ),
                None,
            )
        ]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1.001, err_msg=str(number))


@needs_photos
def test_training_has_the_pixels_of_vision_transformer():
    """vision_transformer slices a random box, resizes and flips; both get equal random numbers."""
    settings = dict(resize='bilinear', antialias=False, uint8_resize=False)
    for number, photo in enumerate(photos()):
        theirs = train(
            photo, number, settings, lambda part: tf.image.resize(part, (SIDE, SIDE)).numpy()
        )
        np.testing.assert_allclose(train(photo, number, settings), theirs, atol=0.01)


def train(photo, number, settings, resized=None):
    """A training image of the pipeline, or of `resized` with the same random numbers."""
    keys = order.augment_bits(3, tf.constant(number, tf.int64), 1)[0]
    if resized is None:
        augment = dict(
            crop='inception',
            min_area=0.05,
            pad=0,
            crop_ratio=1.0,
            flip=True,
            resize='same',
            randaugment={'num_ops': 0},
        )
        encoded = tf.constant(encode(photo, 'PNG'))
        ours, _ = preprocess.train_image(
            encoded, keys, (SIDE, SIDE), augment, settings, tf.constant(False)
        )
        return ours.numpy()
    pixels = np.asarray(photo)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        pixels.shape,
        tf.zeros([1, 0, 4]),
        keys[0],
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.05, 1.0),
        use_image_if_no_bounding_boxes=True,
    )
    theirs = resized(tf.slice(pixels, begin, size).numpy())
    return theirs[:, ::-1] if keys[1, 0] < 0 else theirs
