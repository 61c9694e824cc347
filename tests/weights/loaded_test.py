"""Weights with a module that is ready to be applied."""

import jax
import numpy as np

from tests.support import small
from vit_jax import models, weights


def test_loaded_weights_are_float32_and_compute_what_the_model_computes():
    own = small.make('vit')
    loaded = weights.build(own)
    assert loaded.weights is own
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {np.dtype(np.float32)}
    images = small.images(own)
    module = models.build(own.model, own.num_classes)
    np.testing.assert_allclose(
        loaded.module.apply({'params': loaded.params}, images),
        module.apply({'params': own.float32_params()}, images),
        atol=1e-5,
    )
