"""Random parameters for comparisons of two models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def randomised(model, images, seed=0):
    """Random arrays for all parameters, because a zero head or bias would hide differences.

    Scales are around 1: near 0, each layer would hardly change its input, and a wrong layer would
    hardly be visible.
    """
    params = jax.eval_shape(model.init, jax.random.key(seed), images)['params']
    rng = np.random.default_rng(seed)

    def draw(path, x):
        return jnp.asarray(rng.normal(path[-1].key == 'scale', 0.2, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


def apply(model, variables, images, rngs=None, **options):
    """`model.apply`, compiled, which is much faster than operation by operation."""
    return jax.jit(functools.partial(model.apply, **options))(variables, images, rngs=rngs)
