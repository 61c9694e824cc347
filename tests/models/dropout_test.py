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
    rate, rows = 0.1, 20_000
    y = dropped(rate, (rows // 10, 10, features), kind=kind)
    zero = y == 0
    np.testing.assert_allclose(y[~zero], 1 / (1 - rate), rtol=1e-4)
    of_all, of_column = (4 * np.sqrt(rate * (1 - rate) / n) for n in (zero.size, rows))
    assert abs(zero.mean() - rate) < of_all + 2**-16
    assert np.abs(zero.mean((0, 1)) - rate).max() < of_column
    assert abs(y.mean() - 1) < of_all / (1 - rate) + 2**-16


def test_neighbours_that_share_a_random_number_are_independent():
    zero = dropped(0.3, (40_000, 2)) == 0  # of more, the first half with the second
    both = (zero[:, 0] & zero[:, 1]).mean()
    assert abs(both - 0.09) < 4 * np.sqrt(0.09 * 0.91 / 40_000)


def test_dropout_follows_its_key_and_is_off_in_evaluation():
    a, b, c = (dropped(0.5, (8, 32), seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x, False), x)  # and needs no key
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, True), x)


@pytest.mark.parametrize('kind', CLASSES)
def test_extreme_rates_and_bfloat16(kind):
    assert (dropped(1e-6, (100, 100), kind=kind) == 1).all()  # below the resolution
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
def test_random_bits_are_those_of_jax(shape):
    key = jax.random.fold_in(jax.random.key(7), 3)
    for each in (key, jax.random.PRNGKey(2**40 + 5)):
        found = random_bits(each, shape)
        assert found.dtype == jnp.uint32
        np.testing.assert_array_equal(found, jax.random.bits(each, shape))


def test_keys_of_another_generator_and_more_numbers_than_a_count_has():
    key = jax.random.key(1, impl='rbg')
    np.testing.assert_array_equal(random_bits(key, (5,)), jax.random.bits(key, (5,)))
    many, few = (
        str(jax.make_jaxpr(lambda key, n=n: random_bits(key, (n, 2**16)))(jax.random.key(0)))
        for n in (2**16, 2**16 - 1)
    )
    assert 'random_bits' in many  # is JAX's own, and takes no memory here
    assert 'random_bits' not in few


def test_bfloat16_keeps_the_mean():
    """1 / 0.9 is no bfloat16: a scale that is rounded before the product would be 0.2 % off."""
    x = jax.random.uniform(jax.random.key(5), (500, 1000), jnp.bfloat16, 1, 2)
    y = Dropout(0.1).apply({}, x, True, rngs={'dropout': jax.random.key(0)})
    kept = np.asarray(y, np.float64) != 0
    ratio = np.asarray(y, np.float64)[kept].sum() / np.asarray(x, np.float64)[kept].sum()
    np.testing.assert_allclose(ratio, 1 / 0.9, rtol=2e-4)
