"""A batch computed in equal parts, one after the other, so that each fits in memory or caches."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
from jaxtyping import PyTree

# Tokens of a part on each device. The outputs of a layer for this many tokens stay in the caches of
# a CPU. With far fewer tokens, matrix products are slow, and in training every part adds its
# gradients to the sum of the earlier parts. Measured with 197 tokens per image:
# docs/lab-notes/cpu-experiments.md.
TOKENS_AT_ONCE = 800
TRAINED_AT_ONCE = 1600
# The number of tokens for models that spend most of their time in a ResNet. Small parts would make
# them slower. Large parts take the same time as the whole batch and need less memory.
RESNET_TOKENS_AT_ONCE = 12_800
PIXELS_OF_A_TOKEN = 16 * 16  # in models with a ResNet


def fastest(
    model: nn.Module,
    batch_size: int,
    image_size: tuple[int, int],
    devices: int,
    platform: str = '',
    train: bool = False,
) -> int:
    """The fastest number of parts for computing a batch; 1 means the whole batch.

    On a CPU, a part has up to TOKENS_AT_ONCE tokens on each device (RESNET_TOKENS_AT_ONCE in
    ResNets and hybrids), or TRAINED_AT_ONCE with `train`. A part has at least half as many tokens;
    if no equal parts have, the result is 1. The result is also 1 on other platforms, and for masked
    patches, which depend on the place of an image in the batch.

    Args:
      devices: the number of devices that share the batch.
      platform: the platform; '' stands for the platform of this process.
      train: whether gradients are computed, and not only outputs.
    """
    if (platform or jax.default_backend()) != 'cpu' or not model.rows_are_independent:
        return 1
    if model.resnet is not None:
        tokens_per_image = math.prod(image_size) / PIXELS_OF_A_TOKEN
        max_tokens = RESNET_TOKENS_AT_ONCE
    else:
        tokens_per_image = math.prod(model.grid(image_size)) + model.prefix
        max_tokens = TOKENS_AT_ONCE
    if train:
        max_tokens = TRAINED_AT_ONCE
    max_images = max(1, int(max_tokens / tokens_per_image))
    images = batch_size // devices
    images_per_part = max(n for n in range(1, max_images + 1) if images % n == 0)
    if 2 * images_per_part < max_images:
        return 1
    return images // images_per_part


def in_parts(function: Callable[[PyTree], PyTree], batch: PyTree, parts: int) -> PyTree:
    """Computes function(batch) for one part of the batch at a time.

    All arrays of the batch and of the result are [batch, ...].
    """
    if parts == 1:
        return function(batch)
    return join(jax.lax.map(function, split(batch, parts)))


def split(batch: PyTree, parts: int) -> PyTree:
    """Reshapes [batch, ...] to [parts, batch / parts, ...].

    Part i has the examples i, i + parts, i + 2 parts, ..., so that no data moves between devices.
    """
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def join(batch: PyTree) -> PyTree:
    """Reshapes [parts, batch / parts, ...] to [batch, ...]: the inverse of `split`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), batch)
