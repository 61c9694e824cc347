"""Dropout with masks of bits drops independently, and the backward pass uses the same masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.backends.gpu_dropout import Dropout, drop, random_masks


@pytest.mark.parametrize('rate', [0.1, 0.3])
def test_bits_of_a_byte_are_nearly_independent(rate):
    """Their correlation is at most 1 / 256."""
    rows = 400_000
    x = jnp.ones((rows, 8))
    y = Dropout(rate).apply({}, x, True, rngs={'dropout': jax.random.key(0)})
    zero = np.asarray(y) == 0
    correlation = np.corrcoef(zero.T) - np.eye(8)
    assert np.abs(correlation).max() < 1 / 256 + 4 / np.sqrt(rows)


@pytest.mark.parametrize('features', [8, 13])
def test_output_and_gradient_drop_the_same_numbers(features):
    x, gradient = jax.random.normal(jax.random.key(1), (2, 500, features))
    masks = random_masks(jax.random.key(0), x.shape, 0.3)
    assert (masks.shape, masks.dtype) == ((500, -(-features // 8)), jnp.uint8)
    y, pull = jax.vjp(lambda x: drop(x, masks, 0.3), x)
    np.testing.assert_array_equal(pull(gradient)[0], drop(gradient, masks, 0.3))
    np.testing.assert_allclose(y, np.where(y == 0, 0, x / 0.7), rtol=1e-6)
    assert (y != 0).any(0).all()


def test_masks_of_another_generator_have_the_rate():
    key = jax.random.key(1, impl='rbg')
    share = np.unpackbits(random_masks(key, (1000, 80), 0.1)).mean()
    assert abs(share - 0.9) < 4 * np.sqrt(0.09 / 80_000)
