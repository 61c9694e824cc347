"""What chance leaves out in training: single numbers, and the residual branches of whole images."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Dropout(nn.Module):
    """Sets numbers to zero at random and scales the others, so that the mean stays.

    As nn.Dropout, whose random numbers have 32 bits for each; here they have 16, which takes half
    the time (on CPU a tenth of a training step was spent on them), and `rate` is rounded to 2^-16.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, '... features'], train: bool
                 ) -> Float[Array, '... features']:
        """Without `train` or with rate 0 it returns `x`; else it takes the PRNG key 'dropout'."""
        threshold = min(round(self.rate * 2**16), 2**16 - 1)
        if not train or not threshold:
            return x
        *rows, features = x.shape
        pairs = jax.random.bits(self.make_rng('dropout'), (*rows, -(-features // 2)))
        bits = jax.lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*rows, -1)[..., :features]
        return jnp.where(bits >= threshold, x / (1 - threshold / 2**16), 0)


class StochasticDepth(nn.Module):
    """Drops the residual branch of whole images at random (arXiv 1603.09382), unbiased."""

    @nn.compact
    def __call__(self, y: Float[Array, 'batch tokens hidden'], rate: Float[Array, ''],
                 images: int) -> Float[Array, 'batch tokens hidden']:
        """`batch` is a multiple of `images`: several lines of one image are dropped together."""
        keep = jax.random.bernoulli(self.make_rng('dropout'), 1 - rate, (images,))
        factor = jnp.repeat(keep / (1 - rate), len(y) // images)
        # In float32, because bfloat16 cannot represent 1 / (1 - rate).
        return (y * factor[:, None, None]).astype(y.dtype)
