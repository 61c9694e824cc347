"""Dropout of single numbers, and stochastic depth, which drops residual branches of images."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


class Dropout(nn.Module):
    """Sets numbers to zero at random and scales the others, so that the mean stays the same.

    nn.Dropout draws 32 random bits per number. This class draws 16, which takes half the time and
    rounds `rate` to a multiple of 2^-16.
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
        *rows, features = x.shape
        pairs = random_bits(self.make_rng('dropout'), (*rows, -(-features // 2)))
        # All lower halves come before all upper halves, because a CPU is slow at interleaving them.
        halves = (pairs & 0xFFFF, pairs >> 16)
        kept = jnp.concatenate([half >= threshold for half in halves], axis=-1)
        return scaled(x, kept[..., :features], threshold / 2**16)


def threshold_of(rate: float) -> int:
    """Returns the rate in units of 2^-16, rounded to a whole number below 2^16."""
    return min(round(rate * 2**16), 2**16 - 1)


def scaled(
    x: Float[Array, '... features'], kept: Bool[Array, '... features'], rate: float
) -> Float[Array, '... features']:
    """Returns x / (1 - rate) where `kept`, else 0.

    The division is in float32, because bfloat16 cannot represent the factor.
    """
    return jnp.where(kept, x.astype(jnp.float32) / (1 - rate), 0).astype(x.dtype)


def random_bits(key: Array, shape: tuple[int, ...]) -> UInt32[Array, '...']:
    """Returns the numbers of jax.random.bits(key, shape), in two fifths of the time on a CPU.

    On a CPU JAX runs the 20 rounds of Threefry-2x32 (Salmon et al., Parallel random numbers: as
    easy as 1, 2, 3, SC 2011) in a loop that writes all numbers to memory in each round. Here the
    rounds are unrolled.
    """
    if not _is_supported(key, shape):
        return jax.random.bits(key, shape)
    a, b = _threefry(key, shape)
    return a ^ b


def random_words(key: Array, shape: tuple[int, ...]) -> tuple[UInt32[Array, '...'], ...]:
    """Returns two arrays of random bits, for the cost of one call of random_bits."""
    if _is_supported(key, shape):
        return _threefry(key, shape)
    return tuple(jax.random.bits(key, (2, *shape)))


def _is_supported(key, shape):
    """Whether `key` is a Threefry key and a 32-bit counter is enough for `shape`."""
    return jax.random.key_data(key).shape == (2,) and math.prod(shape) < 2**32


def _threefry(key, shape):
    words = jax.random.key_data(key)
    keys = words[0], words[1], words[0] ^ words[1] ^ np.uint32(0x1BD11BDA)
    count = sum(
        jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(math.prod(shape[axis + 1 :]))
        for axis in range(len(shape))
    )
    a = jnp.zeros_like(count) + keys[0]
    b = count + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            a += b
            b = a ^ (b << rotation | b >> (32 - rotation))
        a += keys[(group + 1) % 3]
        b += keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


class StochasticDepth(nn.Module):
    """Drops residual branches of images at random and rescales the rest (arXiv 1603.09382)."""

    @nn.compact
    def __call__(
        self, y: Float[Array, 'batch tokens hidden'], rate: Float[Array, ''], images: int
    ) -> Float[Array, 'batch tokens hidden']:
        """Returns `y` scaled, or zero for a dropped image.

        Args:
          y: a residual branch.
          rate: probability that an image is dropped.
          images: number of images, a divisor of `batch`. The consecutive entries of one image, such
            as the rows of an axial block, are dropped together.
        """
        keep = jax.random.bernoulli(self.make_rng('dropout'), 1 - rate, (images,))
        factor = jnp.repeat(keep / (1 - rate), len(y) // images)
        # In float32, because bfloat16 cannot represent 1 / (1 - rate).
        return (y * factor[:, None, None]).astype(y.dtype)
