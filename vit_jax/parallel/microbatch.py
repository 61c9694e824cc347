"""A batch computed in equal parts, one after the other, each of which fits in memory or caches."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
from jaxtyping import PyTree

# Of each device. What a layer computes of this many stays in a CPU's caches; far fewer are slow to
# multiply, and in training every part adds its gradients to those of the parts before. Measured
# with 197 tokens of an image: docs/experiments.md.
TOKENS_AT_ONCE, TRAINED_AT_ONCE = 800, 1600
# Where a ResNet takes most of the time. Its outputs are slower in small parts; large ones take
# less memory, and as long.
PIXELS_OF_A_TOKEN, RESNET_TOKENS_AT_ONCE = 16 * 16, 12_800


def fastest(
    model: nn.Module,
    batch_size: int,
    image_size: tuple[int, int],
    devices: int,
    platform: str = '',
    train: bool = False,
) -> int:
    """The number of parts in which a batch is computed fastest; 1 is the whole.

    On a CPU a part has TOKENS_AT_ONCE tokens on each device (RESNET_TOKENS_AT_ONCE in ResNets and
    hybrids), or fewer, down to half as many, so that the parts are equal; with `train`, for outputs
    and gradients, TRAINED_AT_ONCE. Masked patches, which are drawn by the place in a batch, and all
    on other platforms are computed at once. The `platform` is by default that of this process, and
    `devices` share the batch.
    """
    if (platform or jax.default_backend()) != 'cpu' or not model.rows_are_independent:
        return 1
    has_resnet = model.resnet is not None
    tokens = (
        math.prod(image_size) / PIXELS_OF_A_TOKEN
        if has_resnet
        else math.prod(model.grid(image_size)) + model.prefix
    )
    outputs = RESNET_TOKENS_AT_ONCE if has_resnet else TOKENS_AT_ONCE
    most = max(1, int((TRAINED_AT_ONCE if train else outputs) / tokens))
    images = batch_size // devices
    at_once = max(n for n in range(1, most + 1) if images % n == 0)
    return images // at_once if 2 * at_once >= most else 1


def in_parts(function: Callable[[PyTree], PyTree], batch: PyTree, parts: int) -> PyTree:
    """function(batch), of arrays [batch, ...] to arrays [batch, ...], for one part at a time."""
    return function(batch) if parts == 1 else join(jax.lax.map(function, split(batch, parts)))


def split(batch: PyTree, parts: int) -> PyTree:
    """[batch, ...] to [parts, batch / parts, ...].

    Part i has the examples i, i + parts, i + 2 parts, ..., so that no data moves between devices.
    """
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def join(batch: PyTree) -> PyTree:
    """[parts, batch / parts, ...] to [batch, ...]: the inverse of `split`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), batch)
