"""The Vision Transformer (arXiv 2010.11929, section 3.1, equations 1 to 4)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.models.attention import SelfAttention
from vit_jax.models.position import Learned1D

GELU = {
    'tanh': functools.partial(nn.gelu, approximate=True),  # Google's code
    'erf': functools.partial(nn.gelu, approximate=False),  # timm and Hugging Face
}


class Mlp(nn.Module):
    """Two dense layers with a GELU between, dropout after each (equation 3)."""

    mlp_dim: int
    dropout_rate: float
    gelu: str
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden'], train: bool):
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.xavier_uniform(),
                                  bias_init=nn.initializers.normal(stddev=1e-6), dtype=self.dtype)
        hidden_size = x.shape[-1]
        x = GELU[self.gelu](dense(self.mlp_dim, name='dense1')(x))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x = dense(hidden_size, name='dense2')(x)
        return nn.Dropout(self.dropout_rate, deterministic=not train)(x)


class EncoderBlock(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection (equations 2 and 3).

    Returns (tokens, None): the second is what nn.scan collects per layer.
    """

    mlp_dim: int
    num_heads: int
    dropout_rate: float
    gelu: str
    layer_norm_epsilon: float
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden'], train: bool):
        norm = functools.partial(nn.LayerNorm, epsilon=self.layer_norm_epsilon, dtype=self.dtype)
        y = SelfAttention(self.num_heads, self.dtype, name='attention')(norm(name='norm1')(x))
        x = x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)
        y = Mlp(self.mlp_dim, self.dropout_rate, self.gelu, self.dtype, name='mlp')(
            norm(name='norm2')(x), train)
        return x + y, None


class ViT(nn.Module):
    """Images to logits. Attributes are the fields of `config.model`, see vit_jax/config.py.

    `num_classes` logits come from a head of one linear layer; with `representation_size` a tanh
    layer of that width stands before it (section 3.1). `num_classes=0` returns the representation.
    """

    num_classes: int
    patch_size: tuple[int, ...]
    hidden_size: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    representation_size: int = 0
    dropout_rate: float = 0.0
    gelu: str = 'tanh'
    layer_norm_epsilon: float = 1e-6
    head_bias_init: float = 0.0
    dtype: jax.typing.DTypeLike = 'float32'
    unroll: int = 1

    @nn.compact
    def __call__(self, images: Float[Array, 'batch height width channels'], train: bool = False
                 ) -> Float[Array, 'batch num_classes']:
        """Returns float32 logits; with `train` dropout is on and needs the PRNG key 'dropout'.

        Raises UserError when an image side is not a multiple of the patch's.
        """
        x = self.embed_patches(images)  # [batch, patches, hidden]
        cls = self.param('cls', nn.initializers.zeros, (1, 1, self.hidden_size)).astype(x.dtype)
        x = jnp.concatenate([jnp.tile(cls, (len(x), 1, 1)), x], axis=1)
        x = Learned1D(name='position')(x)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x = self.encode(x, train)
        return self.classify(x[:, 0])

    def embed_patches(self, images):
        """Equation 1: one linear projection per patch, patches in row-major order."""
        patch = as_pair(self.patch_size)
        check_divisible(images.shape[1:3], patch)
        x = nn.Conv(self.hidden_size, patch, strides=patch, padding='VALID', dtype=self.dtype,
                    name='embedding')(images)
        return x.reshape(len(x), -1, self.hidden_size)

    def encode(self, x, train):
        """Equations 2 and 3 for every layer; parameters are stacked [num_layers, ...]."""
        blocks = nn.scan(
            EncoderBlock, variable_axes={'params': 0}, in_axes=nn.broadcast,
            split_rngs={'params': True, 'dropout': True}, length=self.num_layers,
            unroll=min(self.unroll, self.num_layers))
        x, _ = blocks(self.mlp_dim, self.num_heads, self.dropout_rate, self.gelu,
                      self.layer_norm_epsilon, self.dtype, name='blocks')(x, train)
        return nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name='norm')(x)

    def classify(self, x):
        """Equation 4 and the head; in float32, because the loss is sensitive to it."""
        x = x.astype(jnp.float32)
        if self.representation_size:
            x = jnp.tanh(nn.Dense(self.representation_size, name='pre_logits')(x))
        if self.num_classes:
            x = nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros,
                         bias_init=nn.initializers.constant(self.head_bias_init), name='head')(x)
        return x


def as_pair(size) -> tuple[int, int]:
    """(height, width) of a size given as an int, (side,) or (height, width); int means square.

    Raises UserError when it is none of these.
    """
    sides = (size,) if isinstance(size, int) else tuple(size)
    if len(sides) not in (1, 2) or not all(isinstance(s, int) and s > 0 for s in sides):
        raise UserError(f'size {size!r}: expected one positive integer, or height and width, '
                        'as in 224 or 224,160.')
    return (sides[0], sides[-1])


def check_divisible(image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
    """Raises UserError, with the nearest sizes that fit, unless patches tile the image."""
    if any(i % p or not i for i, p in zip(image_size, patch_size, strict=True)):
        smaller, larger = (
            'x'.join(str(max(1, i // p + up) * p)
                     for i, p in zip(image_size, patch_size, strict=True))
            for up in (0, 1))
        raise UserError(
            f'image_size {image_size[0]}x{image_size[1]} is not divisible by patch_size '
            f'{patch_size[0]}x{patch_size[1]}. The nearest sizes are {smaller} and {larger}.')
