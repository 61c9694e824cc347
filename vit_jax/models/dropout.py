"""What chance leaves out in training: single numbers, and the residual branches of whole images."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


class Dropout(nn.Module):
    """Sets numbers to zero at random and scales the others, so that the mean stays.

    As nn.Dropout, whose random numbers have 32 bits for each; here they have 16, which takes half
    the time, and `rate` is rounded to 2^-16.
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
        *rows, features = x.shape
        pairs = random_bits(self.make_rng('dropout'), (*rows, -(-features // 2)))
        # The upper halves after the lower ones: side by side a CPU would take them one by one.
        kept = jnp.concatenate(
            [half >= threshold for half in (pairs & 0xFFFF, pairs >> 16)], axis=-1
        )[..., :features]
        return scaled(x, kept, threshold / 2**16)


def threshold_of(rate: float) -> int:
    """The rate in units of 2^-16, below 1."""
    return min(round(rate * 2**16), 2**16 - 1)


def scaled(
    x: Float[Array, '... features'], kept: Bool[Array, '... features'], rate: float
) -> Float[Array, '... features']:
    """x / (1 - rate) where it is kept, else 0.

    Computed in float32, because bfloat16 cannot represent the factor.
    """
    return jnp.where(kept, x.astype(jnp.float32) / (1 - rate), 0).astype(x.dtype)


def random_bits(key: Array, shape: tuple[int, ...]) -> UInt32[Array, '...']:
    """jax.random.bits(key, shape), the same numbers, in two fifths of the time on a CPU.

    There JAX computes the 20 rounds of Threefry-2x32 (Salmon et al., Parallel random numbers: as
    easy as 1, 2, 3, SC 2011) in a loop, with the numbers in memory between its turns.
    """
    if not _is_threefry(key, shape):
        return jax.random.bits(key, shape)
    a, b = _threefry(key, shape)
    return a ^ b


def random_words(key: Array, shape: tuple[int, ...]) -> tuple[UInt32[Array, '...'], ...]:
    """Two arrays of random bits, from the same rounds as random_bits."""
    if _is_threefry(key, shape):
        return _threefry(key, shape)
    return tuple(jax.random.bits(key, (2, *shape)))


def _is_threefry(key, shape):
    """Whether _threefry takes the key, and counts as far as shape goes."""
    return jax.random.key_data(key).shape == (2,) and math.prod(shape) < 2**32


def _threefry(key, shape):
    words = jax.random.key_data(key)
    keys = words[0], words[1], words[0] ^ words[1] ^ np.uint32(0x1BD11BDA)
    count = sum(
        jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(math.prod(shape[axis + 1 :]))
        for axis in range(len(shape))
    )
    a, b = jnp.zeros_like(count) + keys[0], count + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            a += b
            b = a ^ (b << rotation | b >> (32 - rotation))
        a += keys[(group + 1) % 3]
        b += keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


class StochasticDepth(nn.Module):
    """Drops the residual branch of whole images at random (arXiv 1603.09382), unbiased."""

    @nn.compact
    def __call__(
        self, y: Float[Array, 'batch tokens hidden'], rate: Float[Array, ''], images: int
    ) -> Float[Array, 'batch tokens hidden']:
        """`batch` is a multiple of `images`: several lines of one image are dropped together."""
        keep = jax.random.bernoulli(self.make_rng('dropout'), 1 - rate, (images,))
        factor = jnp.repeat(keep / (1 - rate), len(y) // images)
        # In float32, because bfloat16 cannot represent 1 / (1 - rate).
        return (y * factor[:, None, None]).astype(y.dtype)
