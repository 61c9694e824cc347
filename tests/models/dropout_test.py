import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.backends import gpu_dropout
from vit_jax.models.dropout import Dropout, StochasticDepth, random_bits

CLASSES = [Dropout, gpu_dropout.Dropout]


def dropped(rate, shape, seed=0, dtype=jnp.float32, kind=Dropout):
    x = jnp.ones(shape, dtype)
    y = kind(rate).apply({}, x, True, rngs={'dropout': jax.random.key(seed)})
    assert (y.shape, y.dtype) == (shape, dtype)
    return np.asarray(y, np.float64)


@pytest.mark.parametrize('kind', CLASSES)
@pytest.mark.parametrize('features', [64, 63])
def test_dropout_drops_its_share_everywhere_and_keeps_the_mean(features, kind):
    rate = 0.1
    rows = 20_000
    y = dropped(rate, (rows // 10, 10, features), kind=kind)
    zero = y == 0
    np.testing.assert_allclose(y[~zero], 1 / (1 - rate), rtol=1e-4)
    variance = rate * (1 - rate)
    of_all = 4 * np.sqrt(variance / zero.size)
    of_column = 4 * np.sqrt(variance / rows)
    assert abs(zero.mean() - rate) < of_all + 2**-16
    assert np.abs(zero.mean((0, 1)) - rate).max() < of_column
    assert abs(y.mean() - 1) < of_all / (1 - rate) + 2**-16


def test_neighbours_that_share_a_random_number_are_independent():
    # With two features they share a number; with more, the first half shares with the second.
    zero = dropped(0.3, (40_000, 2)) == 0
    both = (zero[:, 0] & zero[:, 1]).mean()
    assert abs(both - 0.09) < 4 * np.sqrt(0.09 * 0.91 / 40_000)


def test_dropout_follows_its_key_and_is_off_in_evaluation():
    a, b, c = (dropped(0.5, (8, 32), seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x, False), x)  # without a key
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, True), x)


@pytest.mark.parametrize('kind', CLASSES)
def test_extreme_rates_and_bfloat16(kind):
    assert (dropped(1e-6, (100, 100), kind=kind) == 1).all()  # below the resolution of 2^-16
    high = dropped(1 - 1e-9, (1000, 1000), kind=kind)
    assert np.isfinite(high).all()
    assert 0 < (high != 0).sum() < 100
    halves = dropped(0.5, (64, 64), dtype=jnp.bfloat16, kind=kind)
    np.testing.assert_array_equal(np.unique(halves), [0, 2])


@pytest.mark.parametrize('parts', [1, 3])
def test_stochastic_depth_keeps_the_expectation(parts):
    y = jnp.asarray(np.random.default_rng(0).normal(size=(2000 * parts, 2, 4)), jnp.float32)
    dropped = StochasticDepth().apply(
        {}, y, jnp.float32(0.3), 2000, rngs={'dropout': jax.random.key(0)}
    )
    factor = np.asarray((dropped / y).reshape(2000, -1))
    np.testing.assert_allclose(factor, np.broadcast_to(factor[:, :1], factor.shape), rtol=1e-5)
    assert set(np.unique(np.round(factor, 4))) == {0, np.float32(np.round(1 / 0.7, 4))}
    assert abs(factor[:, 0].mean() - 1) <= 4 * np.sqrt(0.3 / 0.7 / 2000)


@pytest.mark.parametrize('shape', [(), (1,), (7,), (3, 5, 7), (8, 197, 12), (2, 3, 4, 5)])
def test_random_bits_equal_those_of_jax(shape):
    key = jax.random.fold_in(jax.random.key(7), 3)
    for any_key in (key, jax.random.PRNGKey(2**40 + 5)):
        bits = random_bits(any_key, shape)
        assert bits.dtype == jnp.uint32
        np.testing.assert_array_equal(bits, jax.random.bits(any_key, shape))


def test_other_generators_and_huge_arrays_use_random_bits_of_jax():
    """A 32-bit counter cannot count the huge array. The test traces and allocates nothing."""
    key = jax.random.key(1, impl='rbg')
    np.testing.assert_array_equal(random_bits(key, (5,)), jax.random.bits(key, (5,)))

    def traced(rows):
        return str(jax.make_jaxpr(lambda key: random_bits(key, (rows, 2**16)))(jax.random.key(0)))

    assert 'random_bits' in traced(2**16)
    assert 'random_bits' not in traced(2**16 - 1)


def test_bfloat16_keeps_the_mean():
    """1 / 0.9 rounded to bfloat16 before the product would change the mean by 0.2 %."""
    x = jax.random.uniform(jax.random.key(5), (500, 1000), jnp.bfloat16, 1, 2)
    y = Dropout(0.1).apply({}, x, True, rngs={'dropout': jax.random.key(0)})
    kept = np.asarray(y, np.float64) != 0
    ratio = np.asarray(y, np.float64)[kept].sum() / np.asarray(x, np.float64)[kept].sum()
    np.testing.assert_allclose(ratio, 1 / 0.9, rtol=2e-4)
