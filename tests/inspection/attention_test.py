"""The observed attention weights equal the weights of the model, for every kind of model."""

import jax
import numpy as np
import pytest

from tests.support import reference
from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.parameters import apply, randomised
from tests.support.vit import DEFAULTS, SMALL, random_images
from vit_jax import models
from vit_jax.inspection import attention

IMAGES = random_images(2, 8, 12, 3)


def observe(**fields):
    """A model, its parameters, and its attention for IMAGES."""
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, IMAGES)
    return model, params, attention.observer(model)(params, IMAGES)


@pytest.mark.parametrize(
    'fields',
    [
        dict(num_registers=2),
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                dict(),
                dict(pool='gap', position='relative', position_at='every_layer'),
                dict(pool='map'),
            )
        ),
    ],
    ids=str,
)
def test_weights_and_logits_equal_those_of_the_model(fields):
    """Weights are compared with float64 NumPy, and logits with the ordinary forward pass."""
    model, params, observed = observe(**fields)
    tokens = 6 + observed.class_token + fields.get('num_registers', 0)
    assert observed.prefix == tokens - 6
    assert observed.weights.shape == (3, 2, 4, tokens, tokens)
    assert observed.weights.dtype == np.float32
    assert (observed.grid, observed.class_token) == ((2, 3), 'pool' not in fields)
    for n, image in enumerate(IMAGES):
        _, weights = reference.vit(params, image, {**DEFAULTS, **SMALL, **fields})
        np.testing.assert_allclose(observed.weights[:, n], weights, atol=1e-5)
    expected = apply(model, {'params': params}, IMAGES)
    np.testing.assert_allclose(observed.logits, expected, atol=1e-5 * np.abs(expected).max())


def test_axial_weights_among_all_tokens():
    """In the first layer of a block a query attends to its row, in the second to its column."""
    model, params, observed = observe(attention='axial', pool='gap')
    _, outputs = apply(model, {'params': params}, IMAGES, return_intermediates=True)
    assert observed.weights.shape == (6, 2, 4, 6, 6)
    weights = np.asarray(observed.weights).reshape(
        3, 2, 2, 4, 2, 3, 2, 3
    )  # layer, axis, image, head
    for row in range(2):
        np.testing.assert_array_equal(
            weights[:, 0, :, :, row, :, row], outputs['row_attention'][:, :, row]
        )
        np.testing.assert_array_equal(weights[:, 0, :, :, row, :, 1 - row], 0)
    for column in range(3):
        np.testing.assert_array_equal(
            weights[:, 1, :, :, :, column, :, column], outputs['column_attention'][:, :, column]
        )
    np.testing.assert_allclose(observed.weights.sum(-1), 1, atol=1e-5)


def test_the_readout_is_the_class_token_or_the_mean():
    np.testing.assert_array_equal(attention.readout(observe()[-1]), np.eye(7)[[0, 0]])
    np.testing.assert_allclose(attention.readout(observe(pool='gap')[-1]), 1 / 6)
    np.testing.assert_allclose(
        attention.readout(observe(pool='gap', num_registers=3)[-1]), [[0] * 3 + [1 / 6] * 6] * 2
    )
    np.testing.assert_array_equal(
        attention.readout(observe(num_registers=2)[-1]), np.eye(9)[[0, 0]]
    )


@pytest.mark.parametrize('registers', nightly_but([2], [0, 2]))
def test_the_readout_of_attention_pooling_excludes_registers(registers):
    model, params, observed = observe(pool='map', num_registers=registers)
    _, outputs = apply(model, {'params': params}, IMAGES, return_intermediates=True)
    pool = jax.tree.map(lambda x: np.asarray(x, np.float64), params['pool'])
    for n, tokens in enumerate(np.asarray(outputs['encoded'], np.float64)):
        _, weights = reference.attend(pool['probe'][0], tokens[registers:], pool['attention'])
        np.testing.assert_array_equal(observed.pooling[n, :, :registers], 0)
        np.testing.assert_allclose(observed.pooling[n, :, registers:], weights[:, 0], atol=1e-5)
    np.testing.assert_allclose(attention.readout(observed), observed.pooling.mean(1), atol=1e-6)


@pytest.mark.parametrize('name', ['r50x1', 'axial_r50'])
def test_a_resnet_is_refused(name):
    with refused(kind='inapplicable'):
        attention.observer(models.build(name, 3))
