"""Random parameters, with which a comparison of two models misses nothing, and their use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def randomised(model, images, seed=0):
    """Parameters with every array random, so that a zero head or bias hides nothing.

    Scales are around 1, or each layer would do little to its input and a wrong one hardly show.
    """
    params = jax.eval_shape(model.init, jax.random.key(seed), images)['params']
    rng = np.random.default_rng(seed)

    def draw(path, x):
        return jnp.asarray(rng.normal(path[-1].key == 'scale', 0.2, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


def apply(model, variables, images, rngs=None, **options):
    """`model.apply`, compiled as a whole: operation by operation takes much longer."""
    return jax.jit(functools.partial(model.apply, **options))(variables, images, rngs=rngs)
