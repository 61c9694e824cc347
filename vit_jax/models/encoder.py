"""Transformer encoder blocks: full attention (ViT equations 2 and 3) and axial (appendix D.6)."""

import dataclasses
import functools
import math
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax import fields
from vit_jax.errors import UserError
from vit_jax.fields import RATE, TEXT, number, one_of, whole
from vit_jax.models import position
from vit_jax.models.backends import registry
from vit_jax.models.backends.backend import Backend
from vit_jax.models.backends.xla import GELU
from vit_jax.models.dropout import StochasticDepth
from vit_jax.models.position import ALL_PLACES, PLACES, Position
from vit_jax.models.stack import Dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFields:
    """The fields of `config.model` that all blocks share; stem, pool and norm use some of them."""

    hidden_size: Annotated[int, whole(1), 'numbers of a token']
    mlp_dim: Annotated[int, whole(1), 'hidden numbers of the MLP of a block']
    num_heads: Annotated[int, whole(1), 'of attention; they divide hidden_size']
    block: Annotated[
        str,
        TEXT,
        'sequential: attention, then the MLP (equations 2 and 3); parallel: both of the same '
        'tokens; or PACKAGE.MODULE:CLASS of your own (docs/extending.md)',
    ] = 'sequential'
    position: Annotated[str, one_of(*PLACES), 'embedding of positions (table 8)'] = 'learned_1d'
    position_at: Annotated[
        str,
        one_of(*ALL_PLACES),
        'where it acts: before the first layer, in every one, or in every one the same',
    ] = 'stem'
    dropout_rate: Annotated[
        float, RATE, 'after the embedding and each dense layer of a block but q, k, v'
    ] = 0.0
    attention_dropout_rate: Annotated[float, RATE, 'of the attention weights in the blocks'] = 0.0
    attention_kernel: Annotated[
        str,
        one_of(*registry.ATTENTION),
        'what computes attention in the blocks; '
        'cpu: the fastest on a CPU; cudnn: flash attention of NVIDIA GPUs, '
        'in bfloat16; auto: chosen for the machine',
    ] = 'auto'
    linear_kernel: Annotated[
        str,
        one_of(*registry.LINEAR),
        'what computes linear layers and GELUs '
        'of patches and blocks, with cpu LayerNorms, with gpu dropout; '
        'cpu: the fastest in bfloat16 on a CPU; gpu: on an NVIDIA GPU; auto: '
        'chosen for the machine',
    ] = 'auto'
    layer_scale_init: Annotated[
        float,
        number(least=1e-12, most=1e6, or_else=0, earlier=number(least=0)),
        'of learned factors of the residual branches; 0: no factors',
    ] = 0.0
    gelu: Annotated[
        str, one_of(*GELU), "as in Google's code; in timm and Hugging Face; in OpenAI's CLIP"
    ] = 'tanh'
    layer_norm_epsilon: Annotated[
        float,
        number(1e-20, 1, or_else=0, earlier=number(0, 1)),
        'is added to the variance',
    ] = 1e-6
    dtype: Dtype = 'float32'

    @property
    def backend(self) -> Backend:
        """How the layers of blocks, stem, pool and norms are computed."""
        return registry.get(self.attention_kernel, self.linear_kernel)

    def check(self) -> None:
        """Raises UserError unless the fields fit together."""
        fields.check(fields.declared(BlockFields), vars(self), 'model.', recorded=True)
        if self.hidden_size % self.num_heads:
            raise UserError(
                f'model.hidden_size {self.hidden_size} does not divide among '
                f'{self.num_heads} heads (model.num_heads).'
            )
        position.check(self.position, self.position_at, self.hidden_size)


class Mlp(nn.Module):
    """Two dense layers with a GELU between, dropout after each (equation 3)."""

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
    """What blocks share: the fields, and the parts that a block is made of.

    A block has a compact __call__ with the arguments of EncoderBlock's, and returns the same.
    """

    fields: BlockFields
    grid: tuple[int, int]  # of the tokens, as in position.Position; so is the next
    prefix: int = 0
    lines: int = 1  # consecutive entries of the batch that are one image
    wanted: int | None = None  # compute only this many of the first tokens; they attend to all

    def with_positions(self, x, embedding):
        """The tokens of this layer, and a table for relative_logits or None."""
        # On many devices every example stays where it is, and parameters come to it.
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
        """A LayerNorm."""
        return self.fields.backend.norm(
            epsilon=self.fields.layer_norm_epsilon, dtype=self.fields.dtype, name=name
        )

    def self_attention(self, queries, tokens, relative, train, return_weights):
        """(tokens like `queries`, weights or None) of multi-head attention, with dropout."""
        fields = self.fields
        layer = fields.backend.attention(
            fields.num_heads,
            fields.attention_dropout_rate,
            fields.dtype,
            fields.backend,
            math.prod(self.grid) + self.prefix,
            name='attention',
        )
        y, weights = layer(queries, tokens, relative, train, return_weights)
        return fields.backend.dropout(fields.dropout_rate)(y, train), weights

    def branch(self, y, depth_rate, train, name):
        """LayerScale (arXiv 2103.17239) and stochastic depth of a residual branch, if enabled."""
        init = self.fields.layer_scale_init
        if init:
            constant = nn.initializers.constant(init)
            scale = self.param(name, constant, y.shape[-1:], jnp.float32)
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
        """Returns the tokens, and a dict of intermediates or None: what nn.scan collects.

        Args:
          depth_rate: of stochastic depth in this layer; None for none.
          embedding: the position embedding that all layers share; None for none.
        """
        x, relative = self.with_positions(x, embedding)
        y = self.layer_norm('norm1')(x)
        x = x[:, : self.wanted]
        y, weights = self.self_attention(
            y[:, : self.wanted], y, relative, train, return_intermediates
        )
        x = x + self.branch(y, depth_rate, train, 'scale1')
        y = Mlp(self.fields, name='mlp')(self.layer_norm('norm2')(x), train)
        x = x + self.branch(y, depth_rate, train, 'scale2')
        return x, {'tokens': x, 'attention': weights} if return_intermediates else None


class AxialBlock(nn.Module):
    """Two encoder blocks: attention along each row, then along each column (appendix D.6)."""

    fields: BlockFields
    grid: tuple[int, int]

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch tokens hidden'],
        depth_rate: Float[Array, ''] | None,
        embedding: Array | None,
        train: bool,
        return_intermediates: bool,
    ):
        """As EncoderBlock; attention weights are [batch, rows or columns, heads, query, key]."""
        batch, tokens, hidden_size = x.shape
        fields = self.fields
        if fields.position != 'relative':  # which acts along each line
            x, _ = Position(
                fields.position, fields.position_at, self.grid, fields.num_heads, name='position'
            ).in_layer(x, embedding)
            fields = dataclasses.replace(fields, position='none', position_at='stem')

        def along(name, x):  # [batch, lines, length, hidden]
            lines, length = x.shape[1:3]
            block = EncoderBlock(fields, (1, length), lines=lines, name=name)
            y, out = block(
                x.reshape(-1, length, hidden_size), depth_rate, None, train, return_intermediates
            )
            weights = out and out['attention'].reshape(batch, lines, -1, length, length)
            return y.reshape(x.shape), weights

        x, row_weights = along('row', x.reshape(batch, *self.grid, hidden_size))
        x, column_weights = along('column', x.swapaxes(1, 2))
        x = x.swapaxes(1, 2).reshape(batch, tokens, hidden_size)
        return x, {
            'tokens': x,
            'row_attention': row_weights,
            'column_attention': column_weights,
        } if return_intermediates else None


class AttentionPool(nn.Module):
    """One learned query attends to all tokens, then an MLP (MAP, arXiv 2106.04560 section 3.2)."""

    fields: BlockFields  # of which the dropout does not act here, as in big_vision

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens hidden']) -> Float[Array, 'batch hidden']:
        fields = self.fields
        probe = self.param(
            'probe', nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]), jnp.float32
        )
        probe = jnp.tile(probe.astype(x.dtype), (x.shape[0], 1, 1))
        attention = fields.backend.attention(
            fields.num_heads, 0.0, fields.dtype, fields.backend, name='attention'
        )
        x, _ = attention(probe, x)
        norm = fields.backend.norm(
            epsilon=fields.layer_norm_epsilon, dtype=fields.dtype, name='norm'
        )
        return (x + Mlp(fields, name='mlp')(norm(x), train=False))[:, 0]
