"""Attention in the form that a CPU computes fastest: matrix products and sums over rows.

XLA's kernels for CPUs (jaxlib 0.10.1) multiply bfloat16 matrices with a float32 result if each
operand is [batch, rows, columns] in memory. For any other layout they compute with float32 copies
of the operands, at a third of the speed. The backward pass keeps the exponentials of the forward
pass. The division by their sum is applied to smaller arrays instead.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def attend(
    query: Float[Array, 'batch queries heads head_dim'],
    key: Float[Array, 'batch tokens heads head_dim'],
    value: Float[Array, 'batch tokens heads head_dim'],
) -> Float[Array, 'batch queries heads head_dim']:
    """Returns softmax(query key^T / sqrt(head_dim)) value (ViT equations 6 and 7).

    The result has the query's dtype. Sums and the softmax are float32.
    """
    return _forward(query, key, value)[0]


def _forward(query, key, value):
    dtype = query.dtype
    logits = _product('nqd,nkd->nqk', _rows(query), _rows(key))
    weights = jnp.exp((logits - logits.max(-1, keepdims=True)) * _scale(query)).astype(dtype)
    factor = 1 / weights.astype(jnp.float32).sum(-1, keepdims=True)
    y = _product('nqk,nkd->nqd', weights, _rows(value)) * factor
    y = _from_rows(y, query)
    return y, (query, key, value, weights, factor, y)


def _backward(residuals, gradient):
    """The gradient of the logits is weights * (gradient of weights - its weighted mean)."""
    query, key, value, weights, factor, y = residuals
    factor_of_query = factor.reshape(len(y), y.shape[2], y.shape[1], 1).swapaxes(1, 2)
    mean = (gradient.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1, keepdims=True)
    of_weights = _product('nqd,nkd->nqk', _rows(gradient), _rows(value))
    of_logits = (
        weights.astype(jnp.float32) * (of_weights - _rows(mean)) * (factor * _scale(query))
    ).astype(query.dtype)
    of_value = _product(
        'ndq,nqk->ndk', _columns((gradient * factor_of_query).astype(query.dtype)), weights
    )
    of_key = _product('ndq,nqk->ndk', _columns(query), of_logits)
    of_query = _product('nqk,nkd->nqd', of_logits, _rows(key))
    return _from_rows(of_query, query), _from_columns(of_key, key), _from_columns(of_value, value)


attend.defvjp(_forward, _backward)


def _scale(query):
    return np.float32(1 / np.sqrt(query.shape[-1]))


# XLA merges a transposition into an adjacent product, which would change the layout again. The
# reshape between the two prevents it.


def _rows(x):
    """[batch, tokens, heads, n] as [batch * heads, tokens, n]."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _columns(x):
    """[batch, tokens, heads, n] as [batch * heads, n, tokens]."""
    return x.transpose(0, 2, 3, 1).reshape(-1, x.shape[3], x.shape[1])


def _from_rows(x, like):
    """The inverse of _rows, with the shape and dtype of `like`."""
    batch, tokens, heads, size = like.shape
    return x.astype(like.dtype).reshape(batch, heads, tokens, size).swapaxes(1, 2)


def _from_columns(x, like):
    """The inverse of _columns, with the shape and dtype of `like`."""
    batch, tokens, heads, size = like.shape
    return x.astype(like.dtype).reshape(batch, heads, size, tokens).transpose(0, 3, 1, 2)
