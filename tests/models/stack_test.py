"""Loops over layers and rematerialisation change only the cost of a model."""

import functools

import jax
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.parameters import randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.models import cost

FAMILIES = {
    'vit': dict(position='relative', position_at='shared', layer_scale_init=0.1),
    'axial': dict(attention='axial', pool='gap', position_at='every_layer'),
}


@functools.cache
def loss_and_gradients(family, **way):
    """Parameters, logits, gradients and FLOPs of a training step with dropout."""
    images = random_images(2, 8, 8, 3)
    model = models.build(
        SMALL,
        5,
        **FAMILIES[family],
        **way,
        num_layers=2,
        dropout_rate=0.2,
        stochastic_depth_rate=0.3,
    )
    params = randomised(model, images)

    def loss(params):
        logits = model.apply(
            {'params': params}, images, train=True, rngs={'dropout': jax.random.key(3)}
        )
        return (logits**2).mean(), logits

    gradient = jax.grad(loss, has_aux=True)
    return params, *jax.jit(gradient)(params), cost.count_flops(gradient, params)


@pytest.mark.parametrize('family', ['vit', pytest.param('axial', marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    'way',
    [
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (
                dict(unroll=2, remat_policy='nothing_saveable'),
                dict(remat_policy='products'),
            )
        ),
        *(
            pytest.param(way, marks=[pytest.mark.slow, pytest.mark.nightly])
            for way in (dict(remat_policy='dots_with_no_batch_dims_saveable'), dict(unroll=2))
        ),
    ],
    ids=str,
)
def test_loops_and_rematerialisation_change_nothing(family, way):
    """Parameters, outputs and gradients are equal."""
    params, expected_gradients, expected, flops = loss_and_gradients(family)
    other_params, gradients, logits, other_flops = loss_and_gradients(family, **way)
    assert (other_flops > flops) == ('remat_policy' in way)
    jax.tree.map(np.testing.assert_array_equal, other_params, params)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected_gradients))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest),
        gradients,
        expected_gradients,
    )


@pytest.mark.parametrize('model', [SMALL, 'r50x1'], ids=['vit', 'resnet'])
@pytest.mark.parametrize(
    ('kind', 'field', 'value'),
    [
        ('value', 'unroll', -1),
        ('choice', 'remat_policy', 'full'),
        ('choice', 'dtype', 'float16'),
    ],
)
def test_impossible_fields_are_refused(model, kind, field, value):
    with refused(kind=kind, field=f'model.{field}', value=value):
        models.build(model, 5, **{field: value})


@pytest.mark.parametrize('model', [SMALL, 'r50x1'], ids=['vit', 'resnet'])
def test_an_empty_batch_is_refused(model):
    with refused(kind='value', field='images', value=(0, 32, 32, 3)):
        jax.eval_shape(models.build(model, 5).init, jax.random.key(0), np.zeros((0, 32, 32, 3)))
