"""Which example stands at which position: functions of the seed, never of time, threads or hosts.

Row j of step s is example g = s * batch_size + j of the run. A source with random access shows in
epoch g // n the permutation (seed, g // n) of its n examples.
"""

import numpy as np

from vit_jax.data.host_tensorflow import tf

# The cipher behind the permutation. With few rounds, and with seeds that are small numbers, it
# returns nearly the identity; see `permute`.
_ROUNDS = 16
_PHILOX = 1  # tf.random.Algorithm.PHILOX


def stream_seeds(seed):
    """Two independent integers (for the order, for augmentation) from the seed of the run."""
    order, augment = np.random.SeedSequence(seed % 2**64).generate_state(2)
    return int(order), int(augment)


def permute(index, key, size):
    """A pseudo-random permutation of range(size), one element at a time.

    index: int64 [k]; key: int32 [3] or [k, 3], all bits random; size: int64 scalar.
    Returns int64 [k] in range(size).
    """
    # Not tf.random.experimental.index_shuffle: its 4 rounds leave a visible pattern even under
    # random keys, and it cannot take one key per element.
    return tf.raw_ops.RandomIndexShuffle(index=index, seed=key, max_index=size - 1, rounds=_ROUNDS)


def key_of(seed, *counters):
    """int32 [3] with all bits random, from a seed and one or more integer counters."""
    pair = tf.stack([tf.cast(seed, tf.int64), tf.cast(counters[0], tf.int64)])
    for counter in counters[1:]:
        pair = tf.random.fold_in(pair, tf.cast(counter, tf.int64))
    return tf.random.stateless_uniform([3], pair, minval=None, maxval=None, dtype=tf.int32)


def shuffled_index(position, num_examples, seed):
    """Example at each position of the run; every example once per epoch.

    position: int64 [k] of any epochs. Returns int64 [k] in range(num_examples).
    """
    epoch = position // num_examples
    epochs, which = tf.unique(epoch)  # a batch may cross the end of an epoch
    keys = tf.map_fn(lambda e: key_of(seed, e), epochs, fn_output_signature=tf.int32)
    size = tf.constant(num_examples, tf.int64)
    # The shape is lost by the raw operation when keys differ by row.
    index = permute(position % num_examples, tf.gather(keys, which), size)
    return tf.ensure_shape(index, position.shape)


def positions_of_step(step, batch_size, process_index, process_count):
    """int64 [batch_size / process_count]: positions in the run of the rows of one process."""
    local = batch_size // process_count
    return step * batch_size + process_index * local + tf.range(local, dtype=tf.int64)


def augment_bits(seed, first_position, num_rows):
    """int64 [num_rows, 4, 2], all bits random: four keys for each of consecutive positions.

    What a position gets does not hang on the batch it comes in.
    """
    # The generator is a function of a counter, and one count gives 128 bits. Counting on from four
    # times the position gives all rows at once what a call per image would cost a third of the
    # time of reading a small image for.
    key, _ = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.constant([seed, 0], tf.int64))
    counter = tf.stack([tf.cast(4 * first_position, tf.uint64), tf.constant(0, tf.uint64)])
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[num_rows, 4, 2], key=key, counter=counter, alg=_PHILOX, dtype=tf.int64
    )
