"""Which example stands at which position."""

import numpy as np
import pytest
import tensorflow as tf

from vit_jax.data import order


@pytest.mark.slow
def test_permutation_of_the_order_is_fair():
    """Every example is equally likely at every place, and neighbours are not kept."""
    size, epochs = 7, 350
    places = np.zeros((size, size), int)
    index = order.shuffled_index(tf.range(size * epochs, dtype=tf.int64), size, 0)
    index = index.numpy().reshape(epochs, size)
    for place in range(size):
        places[place] = np.bincount(index[:, place], minlength=size)
    expected = epochs / size
    # Chi-square with 36 degrees of freedom is below 68 but for 1 in 1000.
    assert ((places - expected) ** 2 / expected).sum() < 68
    followed = np.mean(np.diff(index, axis=1) == 1)
    assert abs(followed - 1 / size) < 0.025


def test_keys_of_a_position_do_not_depend_on_the_batch():
    rows = order.augment_bits(7, tf.constant(1000, tf.int64), 50).numpy()
    for i in (0, 1, 17, 49):
        (key,) = order.augment_bits(7, tf.constant(1000 + i, tf.int64), 1)
        np.testing.assert_array_equal(key, rows[i])
    assert len(np.unique(rows)) == rows.size


def test_positions_of_the_processes_make_the_step():
    parts = [order.positions_of_step(5, 12, (process, 3)) for process in range(3)]
    np.testing.assert_array_equal(tf.concat(parts, 0), np.arange(60, 72))


def test_seeds_of_order_and_augmentation_differ():
    found = [seed for run in (0, 1, -1, 2**40) for seed in order.stream_seeds(run)]
    assert len(set(found)) == 8
