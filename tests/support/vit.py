"""Compares a small transformer with the NumPy model of the paper."""

import jax
import numpy as np

from tests.support import reference
from tests.support.parameters import apply, randomised
from vit_jax import models

SMALL = dict(patch_size=(4, 4), hidden_size=32, num_layers=3, mlp_dim=48, num_heads=4)
DEFAULTS = models.fields('b16')


def random_images(*shape, seed=1):
    return jax.random.uniform(jax.random.key(seed), shape, minval=-1)


def assert_equals_reference(fields, shape=(2, 8, 12, 3)):
    """Asserts that `SMALL` with `fields` has the logits and attention of the NumPy model."""
    model = models.build(SMALL, 7, **fields)
    images = random_images(*shape)
    params = randomised(model, images)
    logits, outputs = apply(model, {'params': params}, images, return_intermediates=True)
    for n, image in enumerate(images):
        expected, weights = reference.vit(params, image, {**DEFAULTS, **SMALL, **fields})
        assert np.abs(logits[n] - expected).max() <= 1e-5 * np.abs(expected).max()
        if 'attention' in outputs:
            np.testing.assert_allclose(outputs['attention'][:, n], weights, atol=1e-5)
