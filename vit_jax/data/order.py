"""Which example has which position: functions of the seed, never of time, threads or hosts.

Row j of step s has position g = s * batch_size + j of the run. In epoch g // n, a source with
random access shows the permutation (seed, g // n) of its n examples.
"""

import numpy as np
from jaxtyping import Int32, Int64

from vit_jax.data.host_tensorflow import tf

# Of the cipher behind the permutation: with few rounds and small numbers as seeds, it nearly
# returns the identity.
_ROUNDS = 16


def stream_seeds(seed: int) -> tuple[int, int]:
    """Two independent integers (for the order, for augmentation) from the seed of the run."""
    order, augment = np.random.SeedSequence(seed % 2**64).generate_state(2)
    return int(order), int(augment)


def permute(index: Int64[tf.Tensor, ' k'], key: Int32[tf.Tensor, '*k 3'], size: int | tf.Tensor
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


def shuffled_index(position: Int64[tf.Tensor, ' k'], num_examples: int, seed: int
                   ) -> Int64[tf.Tensor, ' k']:
    """Index of the example at each position, which may be of any epoch; each once per epoch."""
    epochs, which = tf.unique(position // num_examples)  # a batch may cross the end of an epoch
    keys = tf.map_fn(lambda e: key_of(seed, e), epochs, fn_output_signature=tf.int32)
    index = permute(position % num_examples, tf.gather(keys, which), num_examples)
    # The raw operation loses the shape where every row has a key of its own.
    return tf.ensure_shape(index, position.shape)


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
        shape=[num_rows, 4, 2], key=key, counter=counter, dtype=tf.int64,
        alg=tf.random.Algorithm.PHILOX.value)
