"""Transformer encoder blocks: full attention (ViT equations 2 and 3) and axial (appendix D.6)."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.block_fields import BlockFields
from vit_jax.models.dropout import StochasticDepth
from vit_jax.models.position import Position


class Mlp(nn.Module):
    """Two dense layers with a GELU between them, and dropout after each (equation 3)."""

    fields: BlockFields

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden'], train: bool):
        fields = self.fields
        backend = fields.backend
        dense = functools.partial(
            backend.dense,
            kernel_init=nn.initializers.xavier_uniform(),
            bias_init=nn.initializers.normal(stddev=1e-6),
            dtype=fields.dtype,
        )

        def hidden_layer(self, x):
            x = dense(fields.mlp_dim, name='dense1')(x)
            x = nn.with_logical_constraint(x, ('batch', 'tokens', 'mlp'))
            x = backend.gelu(fields.gelu, train)(x)
            return backend.dropout(fields.dropout_rate)(x, train)

        x = backend.remat_hidden(hidden_layer)(self, x)
        x = dense(fields.hidden_size, name='dense2')(x)
        return backend.dropout(fields.dropout_rate)(x, train)


class Block(nn.Module):
    """The base class of blocks, with the fields and the parts of a block.

    A subclass has a compact __call__ with the same arguments and results as EncoderBlock.__call__.
    """

    fields: BlockFields
    grid: tuple[int, int]  # (rows, columns) of patches
    prefix: int = 0  # number of tokens before the patches
    lines: int = 1  # number of consecutive entries of the batch that belong to one image
    num_queries: int | None = None  # number of first tokens that are returned; None: all

    def with_positions(self, x, embedding):
        """Returns the tokens of this layer, and a table for relative_logits or None."""
        # On many devices each example stays on its device, and the parameters are sent to it.
        x = nn.with_logical_constraint(x, ('batch', 'tokens', 'hidden'))
        position = Position(
            self.fields.position,
            self.fields.position_at,
            self.grid,
            self.fields.num_heads,
            self.prefix,
            name='position',
        )
        return position.in_layer(x, embedding)

    def layer_norm(self, name):
        """LN in equations 2 and 3."""
        return self.fields.backend.norm(
            epsilon=self.fields.layer_norm_epsilon, dtype=self.fields.dtype, name=name
        )

    def self_attention(self, queries, tokens, relative, train, return_weights):
        """MSA in equation 2, with dropout; returns (tokens like `queries`, weights or None)."""
        fields = self.fields
        attention = fields.backend.attention(
            fields.num_heads,
            fields.attention_dropout_rate,
            fields.dtype,
            fields.backend,
            math.prod(self.grid) + self.prefix,
            name='attention',
        )
        y, weights = attention(queries, tokens, relative, train, return_weights)
        return fields.backend.dropout(fields.dropout_rate)(y, train), weights

    def branch(self, y, depth_rate, train, name):
        """Applies LayerScale (arXiv 2103.17239) and stochastic depth, if enabled, to a branch."""
        initial_scale = self.fields.layer_scale_init
        if initial_scale:
            init = nn.initializers.constant(initial_scale)
            scale = self.param(name, init, y.shape[-1:], jnp.float32)
            y = y * scale.astype(y.dtype)
        if depth_rate is not None and train:
            y = StochasticDepth()(y, depth_rate, len(y) // self.lines)
        return y


class EncoderBlock(Block):
    """Pre-norm attention and MLP, each with a residual connection (equations 2 and 3)."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch tokens hidden'],
        depth_rate: Float[Array, ''] | None,
        embedding: Array | None,
        train: bool,
        return_intermediates: bool,
    ):
        """Returns the tokens, and a dict of intermediates or None, as nn.scan expects.

        Args:
          x: the output of the layer before.
          depth_rate: stochastic depth rate of this layer; None: off.
          embedding: the position embedding that all layers share, or None.
          train: enables dropout and stochastic depth.
          return_intermediates: return a dict with `tokens` and `attention`.
        """
        x, relative = self.with_positions(x, embedding)

        # Equation 2: z' = MSA(LN(z)) + z
        y = self.layer_norm('norm1')(x)
        x = x[:, : self.num_queries]
        queries = y[:, : self.num_queries]
        y, weights = self.self_attention(queries, y, relative, train, return_intermediates)
        x = x + self.branch(y, depth_rate, train, 'scale1')

        # Equation 3: z = MLP(LN(z')) + z'
        y = Mlp(self.fields, name='mlp')(self.layer_norm('norm2')(x), train)
        x = x + self.branch(y, depth_rate, train, 'scale2')

        if not return_intermediates:
            return x, None
        return x, {'tokens': x, 'attention': weights}


class AxialBlock(nn.Module):
    """Two encoder blocks: attention along each row, then along each column (appendix D.6)."""

    fields: BlockFields
    grid: tuple[int, int]  # (rows, columns) of patches

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch tokens hidden'],
        depth_rate: Float[Array, ''] | None,
        embedding: Array | None,
        train: bool,
        return_intermediates: bool,
    ):
        """Returns the tokens and the intermediates of both blocks, see EncoderBlock.__call__.

        The weights are `row_attention` and `column_attention` [batch, lines, heads, query, key].
        """
        batch, tokens, hidden_size = x.shape
        fields = self.fields
        if fields.position != 'relative':  # relative positions act within rows and columns
            position = Position(
                fields.position, fields.position_at, self.grid, fields.num_heads, name='position'
            )
            x, _ = position.in_layer(x, embedding)
            fields = dataclasses.replace(fields, position='none', position_at='stem')

        def attend_along_lines(name, x):  # [batch, lines, length, hidden]
            lines, length = x.shape[1:3]
            block = EncoderBlock(fields, (1, length), lines=lines, name=name)
            y, intermediates = block(
                x.reshape(-1, length, hidden_size), depth_rate, None, train, return_intermediates
            )
            weights = None
            if return_intermediates:
                weights = intermediates['attention'].reshape(batch, lines, -1, length, length)
            return y.reshape(x.shape), weights

        x, row_weights = attend_along_lines('row', x.reshape(batch, *self.grid, hidden_size))
        x, column_weights = attend_along_lines('column', x.swapaxes(1, 2))
        x = x.swapaxes(1, 2).reshape(batch, tokens, hidden_size)
        if not return_intermediates:
            return x, None
        return x, {
            'tokens': x,
            'row_attention': row_weights,
            'column_attention': column_weights,
        }


class AttentionPool(nn.Module):
    """One learned query attends to all tokens, then an MLP (MAP, arXiv 2106.04560 section 3.2).

    As in big_vision, this head has no dropout.
    """

    fields: BlockFields

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden']) -> Float[Array, 'batch hidden']:
        fields = self.fields
        probe = self.param(
            'probe', nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]), jnp.float32
        )
        queries = jnp.tile(probe.astype(x.dtype), (x.shape[0], 1, 1))
        attention = fields.backend.attention(
            fields.num_heads, 0.0, fields.dtype, fields.backend, name='attention'
        )
        x, _ = attention(queries, x)
        norm = fields.backend.norm(
            epsilon=fields.layer_norm_epsilon, dtype=fields.dtype, name='norm'
        )
        x = x + Mlp(fields, name='mlp')(norm(x), train=False)
        return x[:, 0]
