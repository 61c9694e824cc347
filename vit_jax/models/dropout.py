"""What chance leaves out in training: single numbers, and the residual branches of whole images."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, UInt8, UInt32

MASKS = 'dropout_masks'  # what jax.checkpoint_policies call those of random_masks
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


class Dropout(nn.Module):
    """Sets numbers to zero at random and scales the others, so that the mean stays.

    As nn.Dropout, whose random numbers have 32 bits for each; here they have 16, which takes half
    the time, and `rate` is rounded to 2^-16. By kernel 'gpu' they are others, see random_masks.
    """

    rate: float
    kernel: str = 'auto'  # one of linear.KERNELS

    @nn.compact
    def __call__(
        self, x: Float[Array, '... features'], train: bool
    ) -> Float[Array, '... features']:
        """Without `train` or with rate 0 it returns `x`; else it takes the PRNG key 'dropout'."""
        threshold = min(round(self.rate * 2**16), 2**16 - 1)
        if not train or not threshold:
            return x
        key, rate = self.make_rng('dropout'), threshold / 2**16
        if self.kernel == 'gpu':
            return drop(x, checkpoint_name(random_masks(key, x.shape, rate), MASKS), rate)
        *rows, features = x.shape
        pairs = random_bits(key, (*rows, -(-features // 2)))
        # The upper halves after the lower ones: side by side a CPU would take them one by one.
        kept = jnp.concatenate(
            [half >= threshold for half in (pairs & 0xFFFF, pairs >> 16)], axis=-1
        )[..., :features]
        return _scaled(x, kept, rate)


def _scaled(x, kept, rate):
    # In float32, because bfloat16 cannot represent the factor.
    return jnp.where(kept, x.astype(jnp.float32) / (1 - rate), 0).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def drop(
    x: Float[Array, '... features'], masks: UInt8[Array, '... eighths'], rate: float
) -> Float[Array, '... features']:
    """x / (1 - rate), or 0 where the bit of random_masks(key, x.shape, rate) is 0.

    The backward pass reads these bits again, and not a mask of as many bytes.
    """
    places = jax.lax.broadcasted_iota(jnp.uint32, (*masks.shape, 8), masks.ndim)
    kept = masks[..., None].astype(jnp.uint32) >> places & 1
    return _scaled(x, kept.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]] == 1, rate)


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
    for i, word in enumerate(_random_words(key, masks.shape)):
        for j in range(4):
            turned = word << 8 * j | word >> (32 - 8 * j) if j else word
            masks |= (turned >= np.uint32(rate * 2**32)).astype(jnp.uint32) << 4 * i + j
    return jax.lax.optimization_barrier(masks.astype(jnp.uint8))


def random_bits(key: Array, shape: tuple[int, ...]) -> UInt32[Array, '...']:
    """jax.random.bits(key, shape), the same numbers, in two fifths of the time on a CPU.

    There JAX computes the 20 rounds of Threefry-2x32 (Salmon et al., Parallel random numbers: as
    easy as 1, 2, 3, SC 2011) in a loop, with the numbers in memory between its turns.
    """
    if not _is_threefry(key, shape):
        return jax.random.bits(key, shape)
    a, b = _threefry(key, shape)
    return a ^ b


def _random_words(key, shape):
    return _threefry(key, shape) if _is_threefry(key, shape) else jax.random.bits(key, (2, *shape))


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
