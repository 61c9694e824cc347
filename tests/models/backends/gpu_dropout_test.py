import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.backends.gpu_dropout import Dropout, drop, random_masks


@pytest.mark.parametrize('rate', [0.1, 0.3])
def test_numbers_of_one_word_are_as_good_as_independent(rate):
    """Eight neighbours of the masks of a GPU, of which two correlate by 1 / 256 at most."""
    rows = 400_000
    x = jnp.ones((rows, 8))
    y = Dropout(rate).apply({}, x, True, rngs={'dropout': jax.random.key(0)})
    zero = np.asarray(y) == 0
    correlation = np.corrcoef(zero.T) - np.eye(8)
    assert np.abs(correlation).max() < 1 / 256 + 4 / np.sqrt(rows)


@pytest.mark.parametrize('features', [8, 13])
def test_the_gradient_drops_what_the_output_does(features):
    x, gradient = jax.random.normal(jax.random.key(1), (2, 500, features))
    masks = random_masks(jax.random.key(0), x.shape, 0.3)
    assert (masks.shape, masks.dtype) == ((500, -(-features // 8)), jnp.uint8)
    y, pull = jax.vjp(lambda x: drop(x, masks, 0.3), x)
    np.testing.assert_array_equal(pull(gradient)[0], drop(gradient, masks, 0.3))
    np.testing.assert_allclose(y, np.where(y == 0, 0, x / 0.7), rtol=1e-6)
    assert (y != 0).any(0).all()


def test_masks_of_another_generator():
    key = jax.random.key(1, impl='rbg')
    share = np.unpackbits(random_masks(key, (1000, 80), 0.1)).mean()
    assert abs(share - 0.9) < 4 * np.sqrt(0.09 / 80_000)
