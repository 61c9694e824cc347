"""The stratified order: its prefixes have every class in proportion."""

import numpy as np
import pytest

from vit_jax.data.stratify import stratified_order


def test_an_order_computed_by_hand():
    labels = np.array([0, 0, 0, 0, 1, 1, 2])
    # Places: 0, 3/8, 5/8, 1 of class 0; 0, 1 of class 1; 0 of class 2.
    np.testing.assert_array_equal(stratified_order(labels), [0, 4, 6, 1, 2, 3, 5])


@pytest.mark.parametrize('seed', range(5))
def test_prefixes_are_in_proportion_and_both_ends_have_every_class(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 60, 30)
    labels = rng.permutation(np.repeat(np.arange(30), sizes))
    order = stratified_order(labels)
    assert sorted(order) == list(range(len(labels)))
    assert set(labels[order[:30]]) == set(labels[order[-30:]]) == set(range(30))
    for k in range(30):  # the examples of a class keep their order
        assert (np.diff(order[labels[order] == k]) > 0).all()
    for cut in range(30, len(labels) - 30):
        counts = np.bincount(labels[order[:cut]], minlength=30)
        assert abs(counts - sizes * cut / len(labels)).max() < 2.5


def test_classes_of_equal_size_are_rounded_in_both_directions():
    """The order of the examples decides the direction, not the number of the class."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(40), 15))
    order = stratified_order(labels)
    counts = np.bincount(labels[order[540:]], minlength=40)
    assert sorted(counts) == [1] * 20 + [2] * 20
    assert 5 < (counts[:20] == 2).sum() < 15


def test_order_with_empty_classes_and_of_no_examples():
    np.testing.assert_array_equal(stratified_order(np.array([2, 5, 2])), [0, 1, 2])
    assert stratified_order(np.array([], np.int32)).shape == (0,)
