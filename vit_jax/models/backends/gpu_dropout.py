"""Dropout with masks of single bits, which the backward pass reads again."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, UInt8

from vit_jax.models.dropout import random_words, scaled, threshold_of

MASKS = 'dropout_masks'  # name of the masks for jax.checkpoint_policies


class Dropout(nn.Module):
    """models.dropout.Dropout with other random numbers, see random_masks.

    Both classes have the same name, because Flax derives random numbers from it.
    """

    rate: float

    @nn.compact
    def __call__(
        self, x: Float[Array, '... features'], train: bool
    ) -> Float[Array, '... features']:
        """Returns `x` unless `train`; in training it needs the PRNG key 'dropout'."""
        threshold = threshold_of(self.rate)
        if not train or not threshold:
            return x
        rate = threshold / 2**16
        masks = random_masks(self.make_rng('dropout'), x.shape, rate)
        return drop(x, checkpoint_name(masks, MASKS), rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def drop(
    x: Float[Array, '... features'], masks: UInt8[Array, '... eighths'], rate: float
) -> Float[Array, '... features']:
    """Returns x / (1 - rate), or 0 where the bit of random_masks(key, x.shape, rate) is 0.

    The backward pass reads these bits again, an eighth of the bytes of a boolean mask.
    """
    places = jax.lax.broadcasted_iota(jnp.uint32, (*masks.shape, 8), masks.ndim)
    kept = masks[..., None].astype(jnp.uint32) >> places & 1
    return scaled(x, kept.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]] == 1, rate)


def _drop_forward(x, masks, rate):
    return drop(x, masks, rate), masks


def _drop_backward(rate, masks, gradient):
    # Without the barrier the compiler makes boolean masks in the forward pass and keeps them.
    return drop(*jax.lax.optimization_barrier((gradient, masks)), rate), None


drop.defvjp(_drop_forward, _drop_backward)


def random_masks(key: Array, shape: tuple[int, ...], rate: float) -> UInt8[Array, '... eighths']:
    """Returns a bit for each number of `shape`, 1 with probability 1 - rate, 8 bits to a byte.

    The 8 bits of a byte come from two random words. A word rotated by 0, 8, 16 and 24 bits gives
    four numbers, and each number is below the rate with the exact probability. The numbers start
    with different bits, so two of them are dependent only if their first bits equal the first bits
    of the rate. Their correlation is at most 1 / 256; for rate 0.1 it is 0.0017.
    """
    *rows, features = shape
    masks = jnp.zeros((*rows, -(-features // 8)), jnp.uint32)
    for i, word in enumerate(random_words(key, masks.shape)):
        for j in range(4):
            rotated = word
            if j > 0:
                rotated = word << 8 * j | word >> (32 - 8 * j)
            masks |= (rotated >= np.uint32(rate * 2**32)).astype(jnp.uint32) << 4 * i + j
    # Without the barrier XLA draws the bits again in every operation that reads them.
    return jax.lax.optimization_barrier(masks.astype(jnp.uint8))
