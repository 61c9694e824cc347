"""Axial attention in place of the 3x3 convolutions of a ResNet (ViT appendix D.6).

The position-sensitive axial attention of Axial-DeepLab (arXiv 2003.07853, section 3), in the form
of github.com/csrhddlam/axial-deeplab, from which the ViT paper takes its AxialResNet. There are two
differences. First, that code has batch norms. This file has GroupNorms and standardised kernels
like the paper's other ResNets (section 4.1), because the paper does not name the norms of its
AxialResNet. Second, this file divides attention logits by their deviation without subtracting their
mean, which has no effect in a softmax.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.position import Position


class AxialAttention(nn.Module):
    """Attention along lines of a feature map, with relative positions (equation 4)."""

    num_heads: int  # a divisor of half of the channels
    conv: functools.partial  # makes a resnet.StdConv from the fields that layers do not share
    norm: functools.partial  # makes a GroupNorm in the same way
    epsilon: float  # number added to the variance of the logits of an image and head
    dtype: jax.typing.DTypeLike  # of the computation except logits and softmax, in float32

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch lines length channels']
    ) -> Float[Array, 'batch lines length channels']:
        """Attends within each line; the parameters fit one `length`.

        A key has as many features as a query, and a value has twice as many. Query, key and value
        each have an embedding for every offset between two places. All heads share it.
        """
        length, channels = x.shape[2:]
        d = channels // self.num_heads // 2
        qkv = self.norm(name='norm_qkv')(self.conv(2 * channels, 1, 1, name='conv_qkv')(x))
        qkv = qkv.reshape(*x.shape[:3], self.num_heads, 4 * d)
        query, key, value = jnp.split(qkv, (d, 2 * d), axis=-1)
        query_offsets, key_offsets, value_offsets = self.offsets(length, d)
        logits = [
            _einsum('blqhd,blkhd->bhlqk', query, key),
            _einsum('blqhd,qkd->bhlqk', query, query_offsets),
            _einsum('blkhd,qkd->bhlqk', key, key_offsets),
        ]
        weights = self.weights(logits)
        outputs = [
            jnp.einsum('bhlqk,blkhd->blqhd', weights, value).reshape(x.shape),
            jnp.einsum('bhlqk,qkd->blqhd', weights, value_offsets).reshape(x.shape),
        ]
        y = self.norm(name='norm_out')(jnp.concatenate(outputs, axis=-1))
        return y[..., :channels] + y[..., channels:]

    def offsets(self, length, d):
        """Offset embeddings [query, key, d] for query and key, and [query, key, 2 d] for value."""
        place = jnp.arange(length)
        position = Position(
            'relative', 'every_layer', (1, length), 1, stddev=(2 * d) ** -0.5, name='position'
        )
        table = position.embedding(4 * d)[:, 0].astype(self.dtype)
        embeddings = table[place - place[:, None] + length - 1]
        return jnp.split(embeddings, (d, 2 * d), axis=-1)

    def weights(self, logits):
        """The attention weights: the softmax of the sum of the normalised logits."""
        scales = self.param('scale', nn.initializers.ones, (3, self.num_heads), jnp.float32)

        def normalised(y, scale):
            scaled = y * scale[:, None, None, None]
            return scaled * jax.lax.rsqrt(y.var((2, 3, 4), keepdims=True) + self.epsilon)

        total = sum(normalised(y, scale) for scale, y in zip(scales, logits, strict=True))
        return jax.nn.softmax(total).astype(self.dtype)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
