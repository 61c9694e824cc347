"""Weights of small random models of every kind, and file names for every layout."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.support import interop
from tests.support.parameters import randomised
from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights import Weights
from vit_jax.weights.model import flatten, with_defaults

VIT = dict(patch_size=(8, 8), hidden_size=128, num_layers=2, mlp_dim=96, num_heads=2)
HYBRID = VIT | dict(patch_size=(1, 1), num_layers=1)
WIDTH = dict(width=32)  # for 32 groups, the number in all published models
MODELS = {
    'vit': VIT,
    'gap': VIT | dict(pool='gap'),
    'map': VIT | dict(pool='map'),
    'headless': VIT,
    'hidden-head': VIT | dict(representation_size=20),
    'layer-scale': VIT | dict(layer_scale_init=1e-5),
    'registers': VIT | dict(num_registers=2),
    'registers-gap': VIT | dict(num_registers=3, pool='gap', norm_after_pool=True),
    'clip': VIT | dict(stem_norm=True, layer_norm_epsilon=1e-5, gelu='quick'),
    'no-position': VIT | dict(position='none'),
    'sincos': VIT | dict(position='sincos_2d', pool='gap'),
    'rectangle': VIT | dict(patch_size=(8, 4)),
    'root': HYBRID | dict(patch_size=(2, 2), resnet=variants.hybrid_resnet((), **WIDTH)),
    'hybrid': HYBRID | dict(resnet=variants.hybrid_resnet((1, 3), **WIDTH)),
    'bit': dict(resnet=variants.bit_resnet((2, 1, 3), **WIDTH)),
    'parallel': VIT | dict(block='parallel'),
    'axial': VIT | dict(attention='axial', pool='gap', position='learned_2d'),
    'axial-resnet': dict(resnet=variants.axial_resnet((1, 2), **WIDTH), axial_heads=4),
}
IMAGES = {
    'rectangle': (16, 12, 5),
    'root': (24, 24, 3),
    'hybrid': (32, 24, 3),
    'bit': (24, 24, 3),
    'axial-resnet': (24, 16, 3),
}
PATHS = {
    'google': 'x.npz',
    'big_vision': 'x.npz',
    'timm': 'x',
    'huggingface': 'x',
    'torchvision': 'x.safetensors',
    'vit_jax': 'x.safetensors',
}
FILES = [*PATHS.items(), ('timm', 'x.safetensors'), ('timm', 'x.pth'), ('torchvision', 'x.pth')]
CLASSES = ['ant', 'bee', 'cat', 'dog', 'elk', 'fox', 'gnu']
PREPROCESS = dict(
    fit='squash',
    crop_ratio=0.8,
    resize='bicubic',
    antialias=True,
    uint8_resize=True,
    mean=(0.4, 0.5, 0.6),
    std=(0.3, 0.2, 0.1),
)


@functools.cache
def make(name, **change):
    """Weights of a model of MODELS with some changed fields."""
    *image_size, channels = IMAGES.get(name, (16, 16, 3))
    model = with_defaults(MODELS[name] | change)
    num_classes = 0 if name == 'headless' else 7
    params = randomised(models.build(model, num_classes), np.zeros((1, *image_size, channels)))
    return Weights(
        jax.tree.map(np.asarray, params),
        model,
        num_classes,
        CLASSES if num_classes else None,
        dict(PREPROCESS, image_size=tuple(image_size)),
        'test',
        name,
    )


def with_classes(weights, classes):
    """The weights with a random head for other classes."""
    rows = len(weights.params['head']['kernel'])
    head = {
        'kernel': np.random.default_rng(3).normal(0, 0.3, (rows, len(classes))),
        'bias': np.zeros(len(classes)),
    }
    return dataclasses.replace(
        weights,
        num_classes=len(classes),
        classes=classes,
        params={**weights.params, 'head': {name: x.astype(np.float32) for name, x in head.items()}},
    )


def with_nan(weights):
    """The weights with a single NaN."""
    scale = weights.params['norm']['scale'].copy()
    scale[3] = np.nan
    return dataclasses.replace(
        weights, params=weights.params | {'norm': weights.params['norm'] | {'scale': scale}}
    )


def images(weights, number=2):
    """Random images for the weights, float32 [number, height, width, channels]."""
    shape = (number, *weights.image_size(), weights.channels())
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def logits(weights, batch):
    """The logits of our model."""
    model = models.build(weights.model, weights.num_classes)
    return np.asarray(jax.jit(model.apply)({'params': weights.params}, batch))


def through(original, layout, path):
    """Saves and loads weights.

    Returns:
      (the weights within the limits of the layout, the loaded weights).
    """
    if str(path).endswith('.pth'):
        interop.require('torch')
    approximated, _ = weights.approximate(original, str(path), layout)
    weights.save(approximated, str(path), layout)
    return approximated, weights.load(str(path))


def position_in_class_token(original):
    """Weights for big_vision, which adds no position embedding to the class token.

    Its class token includes the embedding.
    """
    params = original.params
    if 'cls' not in params or 'position' not in params:
        return original
    position = params['position']['embedding'].copy()
    cls = params['cls'] + position[:, :1]
    position[:, :1] = 0
    return dataclasses.replace(
        original, params=params | {'cls': cls, 'position': {'embedding': position}}
    )


def message(function, *args):
    """The message of the UserError of a call."""
    with pytest.raises(UserError) as error:
        function(*args)
    return str(error.value)


def assert_same_arrays(params, expected):
    arrays = flatten(params)
    expected_arrays = flatten(expected)
    assert arrays.keys() == expected_arrays.keys()
    for name, x in expected_arrays.items():
        assert arrays[name].dtype == x.dtype, name
        np.testing.assert_array_equal(arrays[name], x, err_msg=name)


def assert_close(actual, expected):
    """Asserts that logits differ by at most 1e-5 of the largest one."""
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()
