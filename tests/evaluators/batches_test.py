import jax.numpy as jnp
import numpy as np

from vit_jax.evaluators import batches


def test_parts_are_equal_and_take_every_nth_example():
    """So that on many devices, each with neighbouring examples, no data moves."""
    parts = batches.split({'label': jnp.arange(12), 'image': jnp.arange(24.0).reshape(12, 2)}, 3)
    np.testing.assert_array_equal(parts['label'], np.arange(12).reshape(4, 3).T)
    np.testing.assert_array_equal(parts['image'][1], [[2, 3], [8, 9], [14, 15], [20, 21]])


def test_joined_parts_are_the_batch():
    batch = {'label': jnp.arange(12), 'image': jnp.arange(24.0).reshape(12, 2)}
    joined = batches.join(batches.split(batch, 3))
    assert all((joined[name] == batch[name]).all() for name in batch)
