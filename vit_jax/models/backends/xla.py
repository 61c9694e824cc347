"""Flax's own layers and JAX's attention, for every platform, and the reference for tests."""

import functools
from collections.abc import Callable
from typing import TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from vit_jax.models.convolution import convolve

GELU: dict[str, Callable[[Array], Array]] = {
    'tanh': functools.partial(nn.gelu, approximate=True),  # Google's code
    'erf': functools.partial(nn.gelu, approximate=False),  # timm and Hugging Face
    'quick': lambda x: x * nn.sigmoid(1.702 * x),  # OpenAI's CLIP
}


def gelu(form: str, train: bool) -> Callable[[Array], Array]:
    """Returns the function of a key of GELU, which is the same with and without `train`."""
    return GELU[form]


def _convolution(x, kernel, strides, padding, **_):  # patches have no dilation and no groups
    return convolve(x, kernel, strides, padding)


patches = functools.partial(nn.Conv, conv_general_dilated_cls=lambda: _convolution)


def attend(query: Array, key: Array, value: Array, bias: Array | None, tokens: int) -> Array:
    """Computes attention to the first `tokens` keys, see Backend.attend."""
    return jax.nn.dot_product_attention(
        query, key, value, bias, **lengths(query, key, tokens), implementation='xla'
    )


class Lengths(TypedDict, total=False):
    """Arguments of jax.nn.dot_product_attention that limit attention to the first tokens."""

    query_seq_lengths: Int[Array, ' batch']
    key_value_seq_lengths: Int[Array, ' batch']


def lengths(query: Array, key: Array, tokens: int) -> Lengths:
    """Returns the arguments that limit attention to the first `tokens` keys; {} for all keys."""
    if key.shape[1] == tokens:
        return {}

    def for_each_image(length):
        # On the device that has the image.
        return nn.with_logical_constraint(jnp.full(len(key), length, jnp.int32), ('batch',))

    return {
        'query_seq_lengths': for_each_image(query.shape[1]),
        'key_value_seq_lengths': for_each_image(tokens),
    }
