"""Maps of attention: invariants, closed forms, and comparisons with plain loops."""

import itertools
import math

import numpy as np
import pytest

from vit_jax.inspection import maps
from vit_jax.inspection.attention import Observed

GRID = (3, 4)
PATCH = (8, 16)


def observed(weights=None, class_token=True, pooling=None, registers=0):
    """Weights [2 layers, 2 images, 3 heads, tokens, tokens], random ones by default."""
    tokens = 12 + class_token + registers
    if weights is None:
        weights = np.random.default_rng(0).dirichlet(np.full(tokens, 0.3), (2, 2, 3, tokens))
    return Observed(np.zeros((2, 5)), np.asarray(weights, np.float32), pooling, GRID, class_token)


def test_rows_of_rollout_sum_to_one_and_are_the_product_of_the_layers():
    weights = observed().weights
    result = maps.rolled_out(weights)
    np.testing.assert_allclose(result.sum(-1), 1, atol=1e-6)
    first, second = weights.astype(np.float64).mean(2)
    for n in range(2):
        expected = (second[n] + np.eye(13)) / 2 @ ((first[n] + np.eye(13)) / 2)
        np.testing.assert_allclose(result[n], expected, atol=1e-6)
    np.testing.assert_array_equal(
        maps.rolled_out(np.broadcast_to(np.eye(4), (3, 1, 2, 4, 4))), np.eye(4)[None]
    )


def test_rollout_is_weighted_by_the_readout():
    full = maps.rolled_out(observed().weights)
    np.testing.assert_allclose(maps.rollout(observed()).reshape(2, 12), full[:, 0, 1:], atol=1e-6)
    mean = observed(class_token=False)
    np.testing.assert_allclose(
        maps.rollout(mean).reshape(2, 12), maps.rolled_out(mean.weights).mean(1), atol=1e-6
    )
    pooling = np.random.default_rng(1).dirichlet(np.ones(12), (2, 3))
    pooled = observed(class_token=False, pooling=pooling)
    for n in range(2):
        expected = pooling[n].mean(0) @ np.asarray(maps.rolled_out(pooled.weights))[n]
        np.testing.assert_allclose(maps.rollout(pooled)[n].reshape(-1), expected, atol=1e-6)


@pytest.mark.parametrize('registers', [0, 2])
@pytest.mark.parametrize('class_token', [True, False])
def test_attention_of_a_query_is_its_row_of_the_weights(class_token, registers):
    attention = observed(class_token=class_token, registers=registers)
    first = class_token + registers
    result = maps.of_query(attention, (2, 1))
    assert result.shape == (2, 2, 3, 3, 4)
    np.testing.assert_array_equal(
        result.reshape(2, 2, 3, 12), attention.weights[:, :, :, 9 + first, first:]
    )
    if class_token:
        rows = attention.weights[:, :, :, 0, first:]
    else:
        rows = attention.weights[:, :, :, registers:, registers:].mean(-2)
    np.testing.assert_allclose(maps.of_query(attention).reshape(rows.shape), rows, atol=1e-6)
    np.testing.assert_array_equal(maps.of_head(attention), maps.of_query(attention)[-1])


def test_attention_of_the_head_is_the_attention_of_pooling():
    pooling = np.random.default_rng(1).dirichlet(np.ones(12), (2, 3))
    result = maps.of_head(observed(class_token=False, pooling=pooling))
    np.testing.assert_array_equal(result, pooling.reshape(2, 3, 3, 4))


def test_distance_of_uniform_attention_is_the_mean_distance_of_two_patches():
    """Along one axis with n patches of p pixels it is p (n^2 - 1) / 3n."""
    uniform = Observed(None, np.full((1, 1, 1, 11, 11), 1 / 11), None, (1, 10), True)
    np.testing.assert_allclose(maps.distances(uniform, (16, 16)), 16 * 99 / 30, rtol=1e-6)
    points = [(8 * row, 16 * column) for row, column in itertools.product(range(3), range(4))]
    expected = np.mean([math.dist(a, b) for a in points for b in points])
    result = maps.distances(observed(np.full((2, 2, 3, 12, 12), 1 / 12), False), PATCH)
    assert result.shape == (2, 2, 3)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    np.testing.assert_allclose(maps.between_patches(GRID, PATCH).mean(), expected)


def test_distance_excludes_class_token_and_registers():
    """They are neither queries nor keys. A query that attends only to them has distance 0."""
    weights = np.zeros((1, 1, 1, 13, 13))
    weights[..., 0] = 0.75
    for q in range(12):  # each patch to its right neighbour, the last of a row to itself
        weights[..., 1 + q, 1 + (q if q % 4 == 3 else q + 1)] = 0.25
    np.testing.assert_allclose(maps.distances(observed(weights), PATCH), 16 * 3 / 4, rtol=1e-6)
    among_registers = np.zeros((1, 1, 1, 15, 15))
    among_registers[..., 2:, 2:] = weights
    among_registers[..., :3, :] = among_registers[..., :3] = 1
    np.testing.assert_allclose(
        maps.distances(observed(among_registers, registers=2), PATCH), 16 * 3 / 4, rtol=1e-6
    )
    weights[..., 1:] = 0
    np.testing.assert_array_equal(maps.distances(observed(weights), PATCH), 0)


def test_most_of_mass_selects_the_fewest_patches():
    values = np.array([[[5.0, 1.0], [3.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]])
    np.testing.assert_array_equal(
        maps.most_of_mass(values), [[[True, False], [True, False]], [[True, False], [False, False]]]
    )
    np.testing.assert_array_equal(maps.most_of_mass(values, 0.5)[0], [[True, False], [False] * 2])
    random = np.random.default_rng(0).dirichlet(np.ones(12), 50).reshape(50, 3, 4)
    for values, kept in zip(random, maps.most_of_mass(random), strict=True):
        mass = values[kept].sum()
        assert mass >= 0.6 > mass - values[kept].min()
