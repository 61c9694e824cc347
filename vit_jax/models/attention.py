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
    """Attention of some tokens to others, or to themselves."""

    num_heads: int  # the hidden size is divided evenly among them
    dropout_rate: float  # of the attention weights; 0 in the paper
    dtype: jax.typing.DTypeLike  # of the computation, but for the softmax, which is in float32
    backend: Backend
    tokens: int | None = None  # of the context that are attended to; None: all

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'batch queries hidden'],
        context: Float[Array, 'batch tokens hidden'],
        relative: Float[Array, 'offsets heads head_dim'] | None = None,
        train: bool = False,
        return_weights: bool = False,
    ):
        """Returns tokens like `x`, and float32 weights [batch, heads, queries, tokens] or None.

        Args:
          x: what the queries are made of.
          context: what keys and values are made of; `x` itself in self-attention.
          relative: embeddings of the offsets between tokens, see position.relative_logits.
          train: weights are dropped at random.
          return_weights: also computes the weights, without dropout, separately.
        """
        return self.compute(x, context, relative, train, return_weights)

    def compute(self, x, context, relative, train, return_weights):
        """Equations 5 to 8; see __call__. A backend may compute them in another order."""
        dense = self.backend.dense
        query = self.project(dense, 'query', x)
        key = self.project(dense, 'key', context)
        value = self.project(dense, 'value', context)
        y, weights = self.attend(query, key, value, relative, train, return_weights)
        return self.joined(dense, y), weights

    def project(self, dense, name, tokens):
        """Equation 5: queries, keys or values [batch, tokens, heads, head_dim] of the tokens."""
        return self.keep_heads(self.heads(dense, name, tokens))

    def heads(self, dense, name, tokens):
        """What a linear layer of class `dense` returns, with a head for each part of its output."""
        hidden_size = tokens.shape[-1]
        layer = dense(
            (self.num_heads, hidden_size // self.num_heads),
            kernel_init=nn.initializers.xavier_uniform(),
            dtype=self.dtype,
            name=name,
        )
        return layer(tokens)

    def keep_heads(self, y):
        """The heads, each on the devices that have its parameters."""
        return nn.with_logical_constraint(y, ('batch', 'tokens', 'heads', 'head_dim'))

    def attend(self, query, key, value, relative, train, return_weights):
        """Equations 6 and 7: (sums of the values [batch, queries, heads, head_dim], weights)."""
        bias = None if relative is None else relative_logits(query, relative)
        weights = attention_weights(query, key, bias) if return_weights else None
        if train and self.dropout_rate:
            dropout = Dropout(self.dropout_rate)
            dropped = dropout(attention_weights(query, key, bias), train).astype(value.dtype)
            return jnp.einsum('bhqk,bkhd->bqhd', dropped, value), weights
        tokens = self.tokens or key.shape[1]
        return self.backend.attend(query, key, value, bias, tokens), weights

    def joined(self, dense, y, *shift):
        """Equation 8: one linear layer of all heads; `shift` is for gpu.DenseOfShifted."""
        num_heads, head_dim = y.shape[-2:]
        layer = dense(
            num_heads * head_dim,
            axis=(-2, -1),
            kernel_init=nn.initializers.xavier_uniform(),
            dtype=self.dtype,
            name='out',
        )
        return layer(y, *shift)


def attention_weights(
    query: Float[Array, 'batch queries heads head_dim'],
    key: Float[Array, 'batch tokens heads head_dim'],
    bias: Float[Array, 'batch heads queries tokens'] | None,
) -> Float[Array, 'batch heads queries tokens']:
    """softmax(query key / sqrt(head_dim) + bias) over the tokens, in float32 (equation 6)."""
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
    logits = logits / np.sqrt(query.shape[-1])
    return jax.nn.softmax(logits if bias is None else logits + bias)
