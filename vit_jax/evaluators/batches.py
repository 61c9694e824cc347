"""A batch of examples, and how it is split when it does not fit in memory as a whole."""

import jax
from jaxtyping import Array, PyTree

# `image` float32 [batch, height, width, channels]; `label` int32 [batch], or float32
# [batch, classes], in evaluation of 0 and 1; `mask` [batch], 0 for padding and broken images.
Batch = dict[str, Array]


def split(batch: Batch, parts: int) -> Batch:
    """[batch, ...] to [parts, batch / parts, ...].

    Part i has the examples i, i + parts, i + 2 parts, ..., so that no data moves between devices.
    """
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def join(parts: PyTree) -> PyTree:
    """[parts, batch / parts, ...] to [batch, ...]: the inverse of `split`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), parts)
