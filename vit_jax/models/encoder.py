"""Transformer encoder blocks: full attention (ViT equations 2 and 3) and axial (appendix D.6)."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention import Attention
from vit_jax.models.position import Position

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
        x = dense(self.mlp_dim, name='dense1')(x)
        x = GELU[self.gelu](nn.with_logical_constraint(x, ('batch', 'tokens', 'mlp')))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x = dense(hidden_size, name='dense2')(x)
        return nn.Dropout(self.dropout_rate, deterministic=not train)(x)


class StochasticDepth(nn.Module):
    """Leaves the residual branch of whole images out, at random (arXiv 1603.09382).

    What stays is divided by its probability, so that the expectation is the branch itself.
    """

    @nn.compact
    def __call__(self, y: Float[Array, 'batch tokens hidden'], rate: Float[Array, ''],
                 images: int):
        """`batch` may hold several lines of each image; they are dropped together."""
        keep = jax.random.bernoulli(self.make_rng('dropout'), 1 - rate, (images,))
        factor = jnp.repeat(keep / (1 - rate), len(y) // images)
        return (y * factor[:, None, None]).astype(y.dtype)  # 1 / (1 - rate) is no bfloat16


class EncoderBlock(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection (equations 2 and 3).

    Attributes: those of ViT, and
      grid, class_token: what the tokens are, see position.Position.
      parts: entries of the batch that together are one image.
    """

    mlp_dim: int
    num_heads: int
    dropout_rate: float
    attention_dropout_rate: float
    layer_scale_init: float
    gelu: str
    layer_norm_epsilon: float
    dtype: jax.typing.DTypeLike
    position: str
    position_at: str
    grid: tuple[int, int]
    class_token: bool
    parts: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden'],
                 depth_rate: Float[Array, ''] | None, embedding: Array | None, train: bool,
                 return_intermediates: bool):
        """Returns the tokens, and a dict of intermediates or None: what nn.scan collects.

        Args:
          depth_rate: of stochastic depth in this layer; None: off.
          embedding: the position embedding that all layers share, see position.Position.
        """
        # On many devices every example stays where it is, and parameters come to it.
        x = nn.with_logical_constraint(x, ('batch', 'tokens', 'hidden'))
        if self.position_at == 'every_layer':
            embedding = Position(self.position, self.grid, self.class_token, self.num_heads,
                                 name='position')(x.shape[-1])
        relative = embedding if self.position == 'relative' else None
        if embedding is not None and relative is None:
            x = x + embedding.astype(x.dtype)

        norm = functools.partial(nn.LayerNorm, epsilon=self.layer_norm_epsilon, dtype=self.dtype)
        y = norm(name='norm1')(x)
        y, weights = Attention(self.num_heads, self.attention_dropout_rate, self.dtype,
                               name='attention')(y, y, relative, train, return_intermediates)
        y = nn.Dropout(self.dropout_rate, deterministic=not train)(y)
        x = x + self.branch(y, depth_rate, train, 'scale1')
        y = Mlp(self.mlp_dim, self.dropout_rate, self.gelu, self.dtype, name='mlp')(
            norm(name='norm2')(x), train)
        x = x + self.branch(y, depth_rate, train, 'scale2')
        return x, {'tokens': x, 'attention': weights} if return_intermediates else None

    def branch(self, y, depth_rate, train, name):
        """LayerScale (arXiv 2103.17239) and stochastic depth of a residual branch, if asked for."""
        if self.layer_scale_init:
            scale = self.param(name, nn.initializers.constant(self.layer_scale_init), y.shape[-1:])
            y = y * scale.astype(y.dtype)
        if depth_rate is not None and train:
            y = StochasticDepth()(y, depth_rate, len(y) // self.parts)
        return y


class AxialBlock(nn.Module):
    """Two encoder blocks: attention along each row, then along each column (appendix D.6).

    Attributes:
      make_block: EncoderBlock without its fields about position and grid.
      position, position_at, grid: as in EncoderBlock. There is no class token: it is on no grid.
    """

    make_block: Callable[..., EncoderBlock]
    position: str
    position_at: str
    grid: tuple[int, int]

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden'],
                 depth_rate: Float[Array, ''] | None, embedding: Array | None, train: bool,
                 return_intermediates: bool):
        """As EncoderBlock; attention weights are [batch, rows or columns, heads, query, key]."""
        batch, tokens, hidden_size = x.shape
        rows, columns = self.grid
        relative = self.position == 'relative'
        if self.position_at == 'every_layer' and not relative:
            embedding = Position(self.position, self.grid, class_token=False, num_heads=0,
                                 name='position')(hidden_size)
        if embedding is not None:
            x = x + embedding.astype(x.dtype)

        def along(name, x):  # [batch, lines, length, hidden]
            lines, length = x.shape[1:3]
            block = self.make_block(
                position='relative' if relative else 'none',
                position_at='every_layer' if relative else 'stem',
                grid=(1, length), class_token=False, parts=lines, name=name)
            y, out = block(x.reshape(-1, length, hidden_size), depth_rate, None, train,
                           return_intermediates)
            weights = out and out['attention'].reshape(batch, lines, -1, length, length)
            return y.reshape(x.shape), weights

        x, row_weights = along('row', x.reshape(batch, rows, columns, hidden_size))
        x, column_weights = along('column', x.swapaxes(1, 2))
        x = x.swapaxes(1, 2).reshape(batch, tokens, hidden_size)
        return x, {'tokens': x, 'row_attention': row_weights,
                   'column_attention': column_weights} if return_intermediates else None


class AttentionPool(nn.Module):
    """One learned query attends to all tokens, then an MLP (MAP, arXiv 2106.04560 section 3.2).

    Without dropout, as in big_vision.
    """

    mlp_dim: int
    num_heads: int
    gelu: str
    layer_norm_epsilon: float
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden']) -> Float[Array, 'batch hidden']:
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]))
        probe = jnp.tile(probe.astype(x.dtype), (x.shape[0], 1, 1))
        x, _ = Attention(self.num_heads, 0.0, self.dtype, name='attention')(probe, x)
        y = nn.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name='norm')(x)
        y = Mlp(self.mlp_dim, 0.0, self.gelu, self.dtype, name='mlp')(y, train=False)
        return (x + y)[:, 0]
