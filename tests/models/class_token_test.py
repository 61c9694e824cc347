"""The last layer computes only the class token if the head reads nothing else."""

import jax
import numpy as np
import pytest

from tests.support.parameters import randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.models import cost


@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        dict(block='parallel'),
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                dict(num_layers=1),
                dict(num_registers=2, stem_norm=True),
                dict(unroll=3, remat_policy='nothing_saveable'),
                dict(layer_scale_init=0.1, position='sincos_2d', position_at='every_layer'),
            )
        ),
    ],
    ids=str,
)
def test_values_and_gradients_equal_those_of_a_model_that_computes_all_tokens(fields):
    """Intermediates need all tokens. Without them the model has fewer FLOPs."""
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, images)

    def loss(params):
        logits = model.apply({'params': params}, images, train=True)
        return (logits**2).sum()

    def loss_of_all_tokens(params):
        logits, _ = model.apply({'params': params}, images, train=True, return_intermediates=True)
        return (logits**2).sum()

    gradient = jax.value_and_grad(loss)
    gradient_of_all_tokens = jax.value_and_grad(loss_of_all_tokens)
    flops = cost.count_flops(gradient, params)
    assert flops < cost.count_flops(gradient_of_all_tokens, params)
    value, gradients = jax.jit(gradient)(params)
    expected_value, expected = jax.jit(gradient_of_all_tokens)(params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    largest = max(np.abs(y).max() for y in jax.tree.leaves(expected))
    for (path, x), y in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * largest, err_msg=str(path))
