"""Multi-head attention (ViT appendix A, equations 5 to 8)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.backends.backend import Backend
from vit_jax.models.dropout import Dropout
from vit_jax.models.position import relative_logits


class Attention(nn.Module):
    """Multi-head self-attention, or attention of queries to other tokens."""

    num_heads: int  # a divisor of the hidden size
    dropout_rate: float  # of the attention weights; 0 in the paper
    dtype: jax.typing.DTypeLike  # of the computation except the softmax, which is float32
    backend: Backend
    tokens: int | None = None  # number of context tokens that are attended to; None: all

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch queries hidden'],
        context: Float[Array, 'batch tokens hidden'],
        relative: Float[Array, 'offsets heads head_dim'] | None = None,
        train: bool = False,
        return_weights: bool = False,
    ):
        """Returns tokens with the shape of `x`, and the attention weights or None.

        Args:
          x: tokens that the queries are computed from.
          context: tokens that the keys and values are computed from; `x` itself in self-attention.
          relative: embeddings of the offsets between tokens, see position.relative_logits.
          train: enables dropout of the weights.
          return_weights: also compute float32 weights [batch, heads, queries, tokens], without
            dropout.
        """
        return self.compute(x, context, relative, train, return_weights)

    def compute(self, x, context, relative, train, return_weights):
        """Computes equations 5 to 8, see __call__. A backend may override this method."""
        dense = self.backend.dense
        query = self.project(dense, 'query', x)
        key = self.project(dense, 'key', context)
        value = self.project(dense, 'value', context)
        y, weights = self.attend(query, key, value, relative, train, return_weights)
        return self.output_layer(dense, x.shape[-1])(y), weights

    def project(self, dense, name, tokens):
        """Equation 5 for one of q, k and v; returns [batch, tokens, heads, head_dim]."""
        layer = self.input_layer(dense, name, tokens.shape[-1])
        return self.shard_heads(layer(tokens))

    def input_layer(self, dense, name, hidden_size):
        """The linear layer U_qkv of equation 5, for q, k or v, as a layer of class `dense`."""
        return dense(
            (self.num_heads, hidden_size // self.num_heads),
            kernel_init=nn.initializers.xavier_uniform(),
            dtype=self.dtype,
            name=name,
        )

    def shard_heads(self, y):
        """Places each head on the devices that have its parameters."""
        return nn.with_logical_constraint(y, ('batch', 'tokens', 'heads', 'head_dim'))

    def attend(self, query, key, value, relative, train, return_weights):
        """Equations 6 and 7: A = softmax(q k^T / sqrt(head_dim)), SA = A v."""
        bias = None
        if relative is not None:
            bias = relative_logits(query, relative)
        weights = None
        if return_weights:
            weights = attention_weights(query, key, bias)
        if train and self.dropout_rate:
            dropout = Dropout(self.dropout_rate)
            dropped = dropout(attention_weights(query, key, bias), train).astype(value.dtype)
            return jnp.einsum('bhqk,bkhd->bqhd', dropped, value), weights
        tokens = self.tokens or key.shape[1]
        return self.backend.attend(query, key, value, bias, tokens), weights

    def output_layer(self, dense, hidden_size):
        """The linear layer U_msa of equation 8, as a layer of class `dense`."""
        return dense(
            hidden_size,
            axis=(-2, -1),
            kernel_init=nn.initializers.xavier_uniform(),
            dtype=self.dtype,
            name='out',
        )


def attention_weights(
    query: Float[Array, 'batch queries heads head_dim'],
    key: Float[Array, 'batch tokens heads head_dim'],
    bias: Float[Array, 'batch heads queries tokens'] | None,
) -> Float[Array, 'batch heads queries tokens']:
    """Equation 6: softmax(query key^T / sqrt(head_dim) + bias) over the tokens, in float32."""
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
    logits = logits / np.sqrt(query.shape[-1])
    if bias is not None:
        logits = logits + bias
    return jax.nn.softmax(logits)
