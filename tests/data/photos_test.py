"""Twenty real photos, as the chains of four code bases show them to a model."""

import math

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.support import interop
from tests.support.images import encode, evaluated
from tests.support.photos import needs_photos, photos
from vit_jax.data import order, preprocess

SIDE = 224
pytestmark = [pytest.mark.slow, needs_photos]
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
    """timm.data.transforms_imagenet_eval with crop_pct 0.9, which is torchvision's, on Pillow."""
    target = math.floor(SIDE / 0.9)
    short, long = sorted(image.size)
    other = int(target * long / short)
    image = image.resize(
        (other, target) if image.width > image.height else (target, other), FILTERS[method]
    )
    left, top = (int(round((side - SIDE) / 2.0)) for side in image.size)
    return np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), float)


def transformers_vit(image, method):
    """ViTImageProcessor itself: the whole is squashed."""
    return _processed('ViTImageProcessor', image, dict(height=SIDE, width=SIDE), method)


def transformers_clip(image, method):
    """CLIPImageProcessor itself: the short side is resized, and the middle cut out."""
    return _processed(
        'CLIPImageProcessor',
        image,
        dict(shortest_edge=256),
        method,
        crop_size=dict(height=SIDE, width=SIDE),
    )


def _processed(name, image, size, method, **more):
    processor = getattr(interop.require('transformers'), name)(
        size=size, resample=FILTERS[method], do_normalize=False, do_rescale=False, **more
    )
    return processor(image, return_tensors='np')['pixel_values'][0].transpose(1, 2, 0)


CHAINS = {  # how `preprocess` says it
    vision_transformer: dict(fit='squash', crop_ratio=1.0, antialias=False),
    big_vision: dict(fit='cover', crop_ratio=0.875, antialias=False),
    timm: dict(fit='torchvision', crop_ratio=0.9, antialias=True),
    transformers_vit: dict(fit='squash', crop_ratio=1.0, antialias=True),
    transformers_clip: dict(fit='transformers', crop_ratio=0.875, antialias=True),
}


@pytest.mark.parametrize('method', ['bilinear', 'bicubic'])
@pytest.mark.parametrize('chain', CHAINS, ids=lambda chain: chain.__name__)
def test_evaluation_has_the_pixels_of_the_source(chain, method):
    """All but a thousandth of the pixels: Pillow cuts off what bicubic filters overshoot."""
    settings = CHAINS[chain] | dict(resize=method, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    for number, photo in enumerate(photos()):
        theirs = chain(photo, method)
        ours = evaluated(encode(photo, 'PNG'), (SIDE, SIDE), settings).numpy()
        assert theirs.shape == ours.shape
        others = np.abs(np.clip(ours, 0, 255) - np.clip(theirs, 0, 255)) > 1
        assert others.mean() < (0.001 if method == 'bilinear' else 0.01), (number, others.mean())


def test_training_has_the_pixels_of_vision_transformer():
    """tf.slice of a random box, tf.image.resize, and a flip, by the same random numbers."""
    augment = dict(
        crop='inception',
        min_area=0.05,
        pad=0,
        crop_ratio=1.0,
        flip=True,
        resize='same',
        randaugment={'num_ops': 0},
    )
    settings = dict(resize='bilinear', antialias=False)
    for number, photo in enumerate(photos()):
        keys, pixels = order.augment_bits(3, tf.constant(number, tf.int64), 1)[0], np.asarray(photo)
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            pixels.shape,
            tf.zeros([1, 0, 4]),
            keys[0],
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.05, 1.0),
            use_image_if_no_bounding_boxes=True,
        )
        theirs = tf.image.resize(tf.slice(pixels, begin, size), (SIDE, SIDE)).numpy()
        if keys[1, 0] < 0:
            theirs = theirs[:, ::-1]
        ours, _ = preprocess.train_image(
            tf.constant(encode(photo, 'PNG')),
            keys,
            (SIDE, SIDE),
            augment,
            settings,
            tf.constant(False),
        )
        np.testing.assert_allclose(ours, theirs, atol=0.01)
