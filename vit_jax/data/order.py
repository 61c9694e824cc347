"""Which example has which position: functions of the seed, never of time, threads or hosts.

Row j of step s has position g = s * batch_size + j of the run. In epoch g // n, a source with
random access shows the permutation (seed, g // n) of its n examples, unless classes are balanced.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32, Int64

from vit_jax.data.host_tensorflow import tf

# Of the cipher behind the permutation: with few rounds and small numbers as seeds, it nearly
# returns the identity.
_ROUNDS = 16
# Takes the place of an epoch in the key of what `balanced` draws.
_CLASSES = -2
# Of how many positions a share is a whole number.
_PARTS = 2**20
# Neighbours stay neighbours with a probability of 2**-24.
_SWAPS = 24
_MANY = 2**60


def stream_seeds(seed: int) -> tuple[int, int]:
    """Two independent integers (for the order, for augmentation) from the seed of the run."""
    order, augment = np.random.SeedSequence(seed % 2**64).generate_state(2)
    return int(order), int(augment)


def permute(
    index: Int64[tf.Tensor, ' k'], key: Int32[tf.Tensor, '*k 3'], size: int | tf.Tensor
) -> Int64[tf.Tensor, ' k']:
    """Where a pseudo-random permutation of range(size) takes each index.

    The key has all bits random, one for all elements or one for each; a tensor `size` is int64.
    """
    # Not tf.random.experimental.index_shuffle: its 4 rounds leave a visible pattern even with
    # random keys, and it does not take one key per element.
    return tf.raw_ops.RandomIndexShuffle(index=index, seed=key, max_index=size - 1, rounds=_ROUNDS)


def key_of(seed: int, *counters) -> Int32[tf.Tensor, ' 3']:
    """A key with all bits random from a seed and one or more integer counters."""
    pair = tf.stack([tf.cast(seed, tf.int64), tf.cast(counters[0], tf.int64)])
    for counter in counters[1:]:
        pair = tf.random.fold_in(pair, tf.cast(counter, tf.int64))
    return tf.random.stateless_uniform([3], pair, minval=None, maxval=None, dtype=tf.int32)


def shuffled_index(
    position: Int64[tf.Tensor, ' k'], num_examples: int, seed: int
) -> Int64[tf.Tensor, ' k']:
    """Index of the example at each position, which may be of any epoch; each once per epoch."""
    epochs, which = tf.unique(position // num_examples)  # a batch may cross the end of an epoch
    keys = tf.map_fn(lambda e: key_of(seed, e), epochs, fn_output_signature=tf.int32)
    index = permute(position % num_examples, tf.gather(keys, which), num_examples)
    # The raw operation loses the shape where every row has a key of its own.
    return tf.ensure_shape(index, position.shape)


def balanced(
    labels: Int32[np.ndarray, ' examples'], share: float, seed: int
) -> Callable[[Int64[tf.Tensor, ' k']], Int64[tf.Tensor, ' k']]:
    """The function from positions to indices of examples that shows all classes equally often.

    It does so at a share of the positions, evenly spread; the others are those of `shuffled_index`.
    They are cut into rounds that have every class once, in random order, and a class shows a random
    permutation of its examples, then another. `labels` are 0, 1, ..., each of them at least once.
    """
    counts, num_classes = np.bincount(labels), int(labels.max()) + 1
    table, sizes = tf.constant(np.argsort(labels, kind='stable')), tf.constant(counts)
    begins = tf.constant(np.cumsum(counts) - counts)
    part = max(1, round(share * _PARTS))
    keys = tf.random.stateless_uniform(
        [num_classes + 1, 3], [seed, _CLASSES], minval=None, maxval=None, dtype=tf.int32
    )  # the last is of the rounds

    def index_at(position):
        before = position * part // _PARTS  # balanced positions, and so where it stands in them
        time = before // num_classes
        label = _permute_few(before % num_classes, time, keys[-1], num_classes)
        size = tf.gather(sizes, label)
        place = _permute_few(time % size, time // size, tf.gather(keys, label), size)
        index = tf.ensure_shape(tf.gather(table, tf.gather(begins, label) + place), position.shape)
        return (
            index
            if part == _PARTS
            else tf.where(
                (position + 1) * part // _PARTS > before,
                index,
                shuffled_index(position - before, len(labels), seed),
            )
        )

    return index_at


def _permute_few(index, time, key, size):
    """Where permutation number `time` of range(size), which may be small, takes each index.

    The operation behind `permute` permutes 2**16 numbers or more, and again until one is below the
    size. These are swaps (Hoang, Morris, Rogaway, An Enciphering Scheme Based on a Card Shuffle,
    2012): a number and its mirror image at a random place change places or not.
    """
    for turn in range(_SWAPS):
        begin = (time * _SWAPS + turn) * (size + 1)
        mirrored = (permute(begin, key, _MANY) - index) % size
        bits = permute(begin + 1 + tf.maximum(index, mirrored), key, _MANY)
        index = tf.where(bits % 2 > 0, mirrored, index)
    return index


def positions_of_step(step, batch_size: int, share: tuple[int, int]) -> Int64[tf.Tensor, ' local']:
    """Positions in the run of the rows of one process; `share` is (its index, their number)."""
    process, num_processes = share
    local = batch_size // num_processes
    return step * batch_size + process * local + tf.range(local, dtype=tf.int64)


def augment_bits(seed: int, first_position, num_rows: int) -> Int64[tf.Tensor, 'num_rows 4 2']:
    """Four keys, all bits random, for each of consecutive positions, whatever its batch."""
    # The generator is a function of a counter, and one count gives 128 bits. Counting from four
    # times the position makes the keys of all rows in one call; a call for each image would take a
    # third of the time of reading a small one.
    key, _ = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.constant([seed, 0], tf.int64))
    counter = tf.stack([tf.cast(4 * first_position, tf.uint64), tf.constant(0, tf.uint64)])
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[num_rows, 4, 2],
        key=key,
        counter=counter,
        dtype=tf.int64,
        alg=tf.random.Algorithm.PHILOX.value,
    )
