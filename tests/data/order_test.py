"""The order of examples: fair, balanced, and a function of seed and position."""

import numpy as np
import pytest
import tensorflow as tf

from vit_jax.data import order


@pytest.mark.slow
def test_permutations_of_epochs_are_fair():
    """Every example is equally likely at every place, and neighbours are separated."""
    size = 7
    epochs = 350
    places = np.zeros((size, size), int)
    index = order.shuffled_index(tf.range(size * epochs, dtype=tf.int64), size, 0)
    index = index.numpy().reshape(epochs, size)
    for place in range(size):
        places[place] = np.bincount(index[:, place], minlength=size)
    expected = epochs / size
    # Chi-square with 36 degrees of freedom is below 68 except for 1 in 1000.
    assert ((places - expected) ** 2 / expected).sum() < 68
    followed = np.mean(np.diff(index, axis=1) == 1)
    assert abs(followed - 1 / size) < 0.025


def test_keys_of_a_position_do_not_depend_on_the_batch():
    rows = order.augment_bits(7, tf.constant(1000, tf.int64), 50).numpy()
    for i in (0, 1, 17, 49):
        (key,) = order.augment_bits(7, tf.constant(1000 + i, tf.int64), 1)
        np.testing.assert_array_equal(key, rows[i])
    assert len(np.unique(rows)) == rows.size


def test_positions_of_all_processes_are_the_positions_of_the_step():
    parts = [order.positions_of_step(5, 12, (process, 3)) for process in range(3)]
    np.testing.assert_array_equal(tf.concat(parts, 0), np.arange(60, 72))


def test_seeds_of_order_and_augmentation_differ():
    seeds = [seed for run in (0, 1, -1, 2**40) for seed in order.stream_seeds(run)]
    assert len(set(seeds)) == 8


LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), (1, 2, 5, 12)))


def shown(positions, share=1.0, seed=0, labels=LABELS):
    """The indices of the examples at positions."""
    return order.balanced(labels, share, seed)(tf.constant(positions, tf.int64)).numpy()


def test_every_round_has_every_class_and_classes_repeat_no_example_before_all_are_shown():
    rounds = shown(range(4 * 120)).reshape(120, 4)
    labels = LABELS[rounds]
    np.testing.assert_array_equal(np.sort(labels), np.tile(np.arange(4), (120, 1)))
    assert len({tuple(row) for row in labels}) > 20  # of 24 orders of classes
    for label, count in enumerate((1, 2, 5, 12)):
        times = rounds[labels == label].reshape(-1, count)
        np.testing.assert_array_equal(
            np.sort(times), np.tile(np.flatnonzero(label == LABELS), (len(times), 1))
        )
        assert len({tuple(row) for row in times}) > (0, 1, 15, 9)[label]


def test_balanced_examples_are_a_function_of_seed_and_position():
    whole = shown(range(2000))
    for some in ([1999], [3, 3, 700], range(1234, 1301)):
        np.testing.assert_array_equal(shown(some), whole[list(some)])
    assert shown([4 * 10**12])[0] < len(LABELS)
    assert np.mean(shown(range(2000), seed=1) == whole) < 0.3


def test_positions_that_are_not_balanced_show_the_order_of_epochs():
    """A quarter of the positions is balanced, evenly spread."""
    indices = shown(range(400), 0.25)
    is_balanced = np.arange(400) % 4 == 3
    np.testing.assert_array_equal(indices[is_balanced], shown(range(100)))
    rest = order.shuffled_index(tf.range(300, dtype=tf.int64), len(LABELS), 0)
    np.testing.assert_array_equal(indices[~is_balanced], rest)


def test_permutations_of_two_classes_are_fair_and_independent():
    labels = np.array([0] * 3 + [1] * 3)
    rounds = shown(range(2 * 3 * 600), labels=labels).reshape(-1, 2)
    rounds.sort()
    first = rounds[:, 0].reshape(-1, 3)
    second = rounds[:, 1].reshape(-1, 3) - 3
    for times in (first, second):
        _, counts = np.unique(times, axis=0, return_counts=True)
        # Chi-square with 5 degrees of freedom is below 20.5 except for 1 in 1000.
        assert ((counts - 100) ** 2 / 100).sum() < 20.5
    assert abs(np.mean((first == second).all(1)) - 1 / 6) < 0.06
