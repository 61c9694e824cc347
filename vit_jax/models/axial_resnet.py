"""Axial attention in place of the 3x3 convolutions of a ResNet (ViT appendix D.6).

Position-sensitive axial attention of Axial-DeepLab (arXiv 2003.07853, section 3), in the form of
github.com/csrhddlam/axial-deeplab, on which the ViT paper's AxialResNet is based. That has batch
norms; here are GroupNorms and standardised kernels, as in the ViT paper's other ResNets (section
4.1), since it does not say which its AxialResNet has. Attention logits are divided by their
deviation and not shifted, which the softmax would undo.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.position import Position


class AxialAttention(nn.Module):
    """Attention along lines of a feature map that knows of relative positions (equation 4)."""

    num_heads: int  # they divide half of the channels
    conv: functools.partial  # resnet.StdConv with the fields that all layers share
    norm: functools.partial  # GroupNorm with those
    epsilon: float  # is added to the variance of the logits of an image and head
    dtype: jax.typing.DTypeLike  # of the computation, but for logits and softmax, in float32

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch lines length channels']
    ) -> Float[Array, 'batch lines length channels']:
        """Each line by itself; `length` is that of the images the parameters are made for.

        A key has as many numbers as a query, and a value twice as many. Query, key and value each
        have an embedding of every offset between two places, which the heads share.
        """
        length, channels = x.shape[2:]
        d = channels // self.num_heads // 2
        qkv = self.norm(name='norm_qkv')(self.conv(2 * channels, 1, 1, name='conv_qkv')(x))
        query, key, value = jnp.split(
            qkv.reshape(*x.shape[:3], self.num_heads, 4 * d), (d, 2 * d), axis=-1
        )
        place = jnp.arange(length)
        table = (
            Position(
                'relative', 'every_layer', (1, length), 1, stddev=(2 * d) ** -0.5, name='position'
            )
            .embedding(4 * d)[:, 0]
            .astype(self.dtype)
        )
        of_query, of_key, of_value = jnp.split(
            table[place - place[:, None] + length - 1], (d, 2 * d), axis=-1
        )  # [query, key, ...]
        logits = [
            jnp.einsum(axes, *arrays, preferred_element_type=jnp.float32)
            for axes, *arrays in (
                ('blqhd,blkhd->bhlqk', query, key),
                ('blqhd,qkd->bhlqk', query, of_query),
                ('blkhd,qkd->bhlqk', key, of_key),
            )
        ]
        scales = self.param('scale', nn.initializers.ones, (3, self.num_heads), jnp.float32)
        weights = jax.nn.softmax(
            sum(
                y
                * scale[:, None, None, None]
                * jax.lax.rsqrt(y.var((2, 3, 4), keepdims=True) + self.epsilon)
                for scale, y in zip(scales, logits, strict=True)
            )
        ).astype(self.dtype)
        seen = [
            jnp.einsum(axes, weights, array).reshape(x.shape)
            for axes, array in (('bhlqk,blkhd->blqhd', value), ('bhlqk,qkd->blqhd', of_value))
        ]
        y = self.norm(name='norm_out')(jnp.concatenate(seen, axis=-1))
        return y[..., :channels] + y[..., channels:]
