import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.dropout import Dropout, StochasticDepth


def dropped(rate, shape, seed=0, dtype=jnp.float32):
    x = jnp.ones(shape, dtype)
    y = Dropout(rate).apply({}, x, True, rngs={'dropout': jax.random.key(seed)})
    assert (y.shape, y.dtype) == (shape, dtype)
    return np.asarray(y, np.float64)


@pytest.mark.parametrize('features', [64, 63])
def test_dropout_drops_its_share_everywhere_and_keeps_the_mean(features):
    rate, rows = 0.1, 20_000
    y = dropped(rate, (rows // 10, 10, features))
    zero = y == 0
    np.testing.assert_allclose(y[~zero], 1 / (1 - rate), rtol=1e-4)
    of_all, of_column = (4 * np.sqrt(rate * (1 - rate) / n) for n in (zero.size, rows))
    assert abs(zero.mean() - rate) < of_all + 2**-16
    assert np.abs(zero.mean((0, 1)) - rate).max() < of_column
    assert abs(y.mean() - 1) < of_all / (1 - rate) + 2**-16


def test_neighbours_that_share_a_random_number_are_independent():
    zero = dropped(0.3, (40_000, 2)) == 0
    both = (zero[:, 0] & zero[:, 1]).mean()
    assert abs(both - 0.09) < 4 * np.sqrt(0.09 * 0.91 / 40_000)


def test_dropout_follows_its_key_and_is_off_in_evaluation():
    a, b, c = (dropped(0.5, (8, 32), seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x, False), x)  # and needs no key
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, True), x)


def test_extreme_rates_and_bfloat16():
    assert (dropped(1e-6, (100, 100)) == 1).all()  # below the resolution
    high = dropped(1 - 1e-9, (1000, 1000))
    assert np.isfinite(high).all()
    assert 0 < (high != 0).sum() < 100
    np.testing.assert_array_equal(np.unique(dropped(0.5, (64, 64), dtype=jnp.bfloat16)), [0, 2])


@pytest.mark.parametrize('parts', [1, 3])
def test_stochastic_depth_keeps_the_expectation(parts):
    y = jnp.asarray(np.random.default_rng(0).normal(size=(2000 * parts, 2, 4)), jnp.float32)
    dropped = StochasticDepth().apply({}, y, jnp.float32(0.3), 2000,
                                      rngs={'dropout': jax.random.key(0)})
    factor = np.asarray((dropped / y).reshape(2000, -1))
    np.testing.assert_allclose(factor, np.broadcast_to(factor[:, :1], factor.shape), rtol=1e-5)
    assert set(np.unique(np.round(factor, 4))) == {0, np.float32(np.round(1 / 0.7, 4))}
    assert abs(factor[:, 0].mean() - 1) <= 4 * np.sqrt(0.3 / 0.7 / 2000)
