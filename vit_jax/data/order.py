"""The order of examples: a function of the seed, never of time, threads or hosts.

Row j of step s has position g = s * batch_size + j of the run. In epoch g // n, a source with
random access shows example permutation(seed, g // n)[g mod n] of its n examples, unless classes are
balanced.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32, Int64

from vit_jax.data.host_tensorflow import tf

# Rounds of the cipher that computes the permutation. With few rounds and small seeds, the
# permutation is nearly the identity.
_ROUNDS = 16
# Replaces the epoch in the key of the random numbers of `balanced`.
_CLASSES = -2
# The share of balanced positions is rounded to a multiple of 1 / _PARTS.
_PARTS = 2**20
# Neighbours stay neighbours with a probability of 2**-24.
_SWAPS = 24
# The size of a permutation whose values serve as random numbers.
_MANY = 2**60


def stream_seeds(seed: int) -> tuple[int, int]:
    """Two independent integers (for the order, for augmentation) from the seed of the run."""
    order, augment = np.random.SeedSequence(seed % 2**64).generate_state(2)
    return int(order), int(augment)


def permute(
    index: Int64[tf.Tensor, ' k'], key: Int32[tf.Tensor, '*k 3'], size: int | tf.Tensor
) -> Int64[tf.Tensor, ' k']:
    """The value of a pseudo-random permutation of range(size) at each index.

    Args:
      index: positions in the permutation.
      key: one key for all elements, or a key for each element. All bits of a key are random.
      size: the size of the permutation; int64 if it is a tensor.
    """
    # Not tf.random.experimental.index_shuffle: its 4 rounds leave a visible pattern even with
    # random keys, and it does not take one key per element.
    return tf.raw_ops.RandomIndexShuffle(index=index, seed=key, max_index=size - 1, rounds=_ROUNDS)


def key_of(seed: int, *counters) -> Int32[tf.Tensor, ' 3']:
    """A key of random bits, as a function of a seed and one or more integer counters."""
    pair = tf.stack([tf.cast(seed, tf.int64), tf.cast(counters[0], tf.int64)])
    for counter in counters[1:]:
        pair = tf.random.fold_in(pair, tf.cast(counter, tf.int64))
    return tf.random.stateless_uniform([3], pair, minval=None, maxval=None, dtype=tf.int32)


def shuffled_index(
    position: Int64[tf.Tensor, ' k'], num_examples: int, seed: int
) -> Int64[tf.Tensor, ' k']:
    """Index of the example at each position; every epoch shows every example once."""
    # A batch may cross the end of an epoch.
    epochs, epoch_of_row = tf.unique(position // num_examples)
    keys = tf.map_fn(lambda epoch: key_of(seed, epoch), epochs, fn_output_signature=tf.int32)
    index = permute(position % num_examples, tf.gather(keys, epoch_of_row), num_examples)
    # The raw operation loses the shape if every row has its own key.
    return tf.ensure_shape(index, position.shape)


def balanced(
    labels: Int32[np.ndarray, ' examples'], share: float, seed: int
) -> Callable[[Int64[tf.Tensor, ' k']], Int64[tf.Tensor, ' k']]:
    """Returns a function from positions to indices that shows all classes equally often.

    A share of the positions, evenly spread, is balanced; the other positions show examples as
    `shuffled_index` does. The balanced positions form rounds, each with every class once in random
    order. A class shows all its examples in a random order, then again in another one.

    Args:
      labels: the classes 0, 1, ... of the examples; each class occurs at least once.
      share: the share of balanced positions, above 0 and up to 1.
    """
    sizes_by_class = np.bincount(labels)
    num_classes = int(labels.max()) + 1
    by_class = tf.constant(np.argsort(labels, kind='stable'))
    class_sizes = tf.constant(sizes_by_class)
    first_of_class = tf.constant(np.cumsum(sizes_by_class) - sizes_by_class)
    balanced_parts = max(1, round(share * _PARTS))
    # One key for each class; the last key is for the order of classes in the rounds.
    keys = tf.random.stateless_uniform(
        [num_classes + 1, 3], [seed, _CLASSES], minval=None, maxval=None, dtype=tf.int32
    )

    def balanced_index(number):
        """The index of the example at each balanced position, counted among these positions."""
        round_number = number // num_classes
        label = _permute_small(number % num_classes, round_number, keys[-1], num_classes)
        size = tf.gather(class_sizes, label)
        rank = _permute_small(
            round_number % size, round_number // size, tf.gather(keys, label), size
        )
        return tf.gather(by_class, tf.gather(first_of_class, label) + rank)

    def index_at(position):
        balanced_before = position * balanced_parts // _PARTS
        index = tf.ensure_shape(balanced_index(balanced_before), position.shape)
        if balanced_parts == _PARTS:
            return index
        is_balanced = (position + 1) * balanced_parts // _PARTS > balanced_before
        others = shuffled_index(position - balanced_before, len(labels), seed)
        return tf.where(is_balanced, index, others)

    return index_at


def _permute_small(index, time, key, size):
    """The value of permutation number `time` of range(size) at each index; for small sizes too.

    The operation in `permute` permutes at least 2**16 numbers, and repeats this until the result is
    below the size. This function uses swaps instead (Hoang, Morris, Rogaway, An Enciphering Scheme
    Based on a Card Shuffle, 2012). In each round, a random bit decides whether a number and its
    mirror image at a random centre change places.
    """
    for swap in range(_SWAPS):
        begin = (time * _SWAPS + swap) * (size + 1)
        mirrored = (permute(begin, key, _MANY) - index) % size
        bits = permute(begin + 1 + tf.maximum(index, mirrored), key, _MANY)
        index = tf.where(bits % 2 > 0, mirrored, index)
    return index


def positions_of_step(step, batch_size: int, share: tuple[int, int]) -> Int64[tf.Tensor, ' local']:
    """Positions of the rows of one process; `share` is (its index, number of processes)."""
    process, num_processes = share
    local = batch_size // num_processes
    return step * batch_size + process * local + tf.range(local, dtype=tf.int64)


def augment_bits(seed: int, first_position, num_rows: int) -> Int64[tf.Tensor, 'num_rows 4 2']:
    """Four keys of random bits for each of `num_rows` consecutive positions.

    The keys of a position do not depend on its batch.
    """
    # The generator is a function of a counter, and one count gives 128 bits. Counting from four
    # times the position makes the keys of all rows in one call. One call per image would take a
    # third of the time that reading a small image takes.
    key, _ = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.constant([seed, 0], tf.int64))
    counter = tf.stack([tf.cast(4 * first_position, tf.uint64), tf.constant(0, tf.uint64)])
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[num_rows, 4, 2],
        key=key,
        counter=counter,
        dtype=tf.int64,
        alg=tf.random.Algorithm.PHILOX.value,
    )
