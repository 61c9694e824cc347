"""Dropout whose masks a GPU writes as bits, and reads again in the backward pass."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, UInt8

from vit_jax.models.dropout import random_words, scaled, threshold_of

MASKS = 'dropout_masks'  # what jax.checkpoint_policies call those of random_masks


class Dropout(nn.Module):
    """models.dropout.Dropout with other random numbers, see random_masks.

    The name is that of the other class, because Flax derives random numbers from names.
    """

    rate: float

    @nn.compact
    def __call__(
        self, x: Float[Array, '... features'], train: bool
    ) -> Float[Array, '... features']:
        """Without `train` or with rate 0 it returns `x`; else it takes the PRNG key 'dropout'."""
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
    """x / (1 - rate), or 0 where the bit of random_masks(key, x.shape, rate) is 0.

    The backward pass reads these bits again, and not a mask of as many bytes.
    """
    places = jax.lax.broadcasted_iota(jnp.uint32, (*masks.shape, 8), masks.ndim)
    kept = masks[..., None].astype(jnp.uint32) >> places & 1
    return scaled(x, kept.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]] == 1, rate)


def _drop_forward(x, masks, rate):
    return drop(x, masks, rate), masks


def _drop_backward(rate, masks, gradient):
    # The barrier keeps the compiler from making masks of bytes in the forward pass, for both.
    return drop(*jax.lax.optimization_barrier((gradient, masks)), rate), None


drop.defvjp(_drop_forward, _drop_backward)


def random_masks(key: Array, shape: tuple[int, ...], rate: float) -> UInt8[Array, '... eighths']:
    """A bit for each number of `shape`, 1 with probability 1 - rate; eight of a row are a byte.

    Eight bits need two words: the bits of a word, turned by 0, 8, 16 and 24 places, are four
    numbers, each of which is below the rate with exactly its probability. As they begin with bits
    of their own, two of a word depend on one another only where these equal those of the rate: they
    correlate by 1 / 256 at most, with rate 0.1 by 0.0017. The barrier has XLA draw the bits once,
    not in every operation that reads them.
    """
    *rows, features = shape
    masks = jnp.zeros((*rows, -(-features // 8)), jnp.uint32)
    for i, word in enumerate(random_words(key, masks.shape)):
        for j in range(4):
            turned = word << 8 * j | word >> (32 - 8 * j) if j else word
            masks |= (turned >= np.uint32(rate * 2**32)).astype(jnp.uint32) << 4 * i + j
    return jax.lax.optimization_barrier(masks.astype(jnp.uint8))
