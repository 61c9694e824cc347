"""Checksums of arrays, computed on the devices: one flipped bit anywhere changes them."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32


@jax.jit
def compute(tree: PyTree) -> PyTree:
    """One checksum per array of the tree: the sum of its bits times odd weights, modulo 2**32.

    It is the same on any mesh, because integer sums do not depend on their order. A flipped bit
    always changes it by a power of two times an odd number. Arrays: float or int, 16 or 32 bits.
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
    """{".params['cls']": checksum, ...} of a tree, as a checkpoint keeps it."""
    checksums = jax.device_get(compute(tree))
    return {
        jax.tree_util.keystr(path): int(value)
        for path, value in jax.tree.leaves_with_path(checksums)
    }
