"""Checksums of arrays, computed on the devices; every flipped bit changes them."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32


@jax.jit
def compute(tree: PyTree) -> PyTree:
    """One checksum per array: the sum of its bit patterns times odd weights, modulo 2**32.

    The checksum is the same on any mesh, because integer sums do not depend on their order. A
    flipped bit changes it by a power of two times an odd number, which is never 0.

    Args:
      tree: float or int arrays of 16 or 32 bits.
    """
    return jax.tree.map(_checksum, tree)


def _checksum(x: Array) -> UInt32[Array, '']:
    bits = jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}').astype(jnp.uint32)
    strides = [math.prod(x.shape[d + 1 :]) for d in range(x.ndim)]
    index = sum(
        (
            jax.lax.broadcasted_iota(jnp.uint32, x.shape, d) * jnp.uint32(s % 2**32)
            for d, s in enumerate(strides)
        ),
        jnp.zeros(x.shape, jnp.uint32),
    )
    weights = index * jnp.uint32(2654435762) + jnp.uint32(1)  # odd: an even factor, plus one
    return jnp.sum(bits * weights, dtype=jnp.uint32)


def describe(tree: PyTree) -> dict[str, int]:
    """The checksums by path, {".params['cls']": checksum, ...}, as in a checkpoint."""
    checksums = jax.device_get(compute(tree))
    return {
        jax.tree_util.keystr(path): int(value)
        for path, value in jax.tree.leaves_with_path(checksums)
    }
