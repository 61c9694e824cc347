"""Layers in the form that an NVIDIA GPU computes fastest, and attention by cuDNN.

On a GPU (jaxlib 0.11.2) XLA sums the rows of a batch, which is the gradient of every bias, in
bfloat16, with errors of 14 to 18 % in a small model. Here the sums are float32.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.attention import Attention
from vit_jax.models.backends import gpu_dropout, xla
from vit_jax.models.backends.layers import (
    broadcast,
    cut_into_patches,
    dense_parameters,
    leading_axes,
    patch_parameters,
    patch_sides,
)

# Of XLA: products by cuBLAS alone, which adds up what follows, too, and one for each linear layer.
# XLA's own products split the sum and do not count the time to join its parts.
COMPILER_OPTIONS = {'xla_gpu_enable_triton_gemm': False, 'xla_gpu_dot_merger_threshold_mb': 0}


class Dense(nn.DenseGeneral):
    """nn.DenseGeneral over the last axes of its input, with the same parameters."""

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens ...']) -> Float[Array, 'batch tokens ...']:
        kernel, bias = dense_parameters(self, x)
        leading = x.shape[: leading_axes(self, x)]
        y = multiply(x.astype(self.dtype), kernel, bias.size, leading)
        y += broadcast(bias.reshape(-1), y.shape, y.dtype, sum_of_rows)
        return y.reshape(*leading, *bias.shape)


class DenseWithoutBias(nn.DenseGeneral):
    """Dense that leaves its bias to the caller."""

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens ...']):
        """Returns (what Dense returns before it adds the bias, bias)."""
        kernel, bias = dense_parameters(self, x)
        leading = x.shape[: leading_axes(self, x)]
        y = multiply(x.astype(self.dtype), kernel, bias.size, leading)
        return y.reshape(*leading, *bias.shape), bias


class DenseOfShifted(nn.DenseGeneral):
    """Dense of an input to every token of which a shift is still to be added."""

    @nn.compact
    def __call__(  # type: ignore[override]  # it takes a shift besides
        self, x: Float[Array, 'batch tokens ...'], shift: Float[Array, '...']
    ) -> Float[Array, 'batch tokens ...']:
        """Dense of x + shift; `shift` has the shape of one token of x."""
        kernel, bias = dense_parameters(self, x)
        bias += jnp.tensordot(shift, kernel, shift.ndim)
        leading = x.shape[: leading_axes(self, x)]
        y = multiply(x.astype(self.dtype), kernel, bias.size, leading)
        y += broadcast(bias.reshape(-1), y.shape, y.dtype, sum_of_rows)
        return y.reshape(*leading, *bias.shape)


def multiply(x: Array, kernel: Array, columns: int, leading: tuple[int, ...]) -> Array:
    """x kernel as a product of matrices: [*leading, columns].

    cuBLAS adds a bias on the way only to the columns of a matrix.
    """
    return jnp.matmul(x.reshape(*leading, -1), kernel.astype(x.dtype).reshape(-1, columns))


class Patches(nn.Conv):
    """nn.Conv of patches that do not overlap, with the same parameters, as a 1x1 convolution.

    cuDNN's convolution of images of three channels takes twenty times as long (B/16 on an H200).
    """

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width channels']
    ) -> Float[Array, 'batch rows columns features']:
        x = cut_into_patches(images, patch_sides(self), self.dtype)
        kernel, bias = patch_parameters(self, images.shape[-1])
        # No product of matrices: XLA would lay out all that follows with the images side by side.
        y = jax.lax.conv_general_dilated(
            x,
            kernel.astype(self.dtype)[None, None],
            (1, 1),
            'VALID',
            dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        )
        if bias is None:
            return y
        return y + broadcast(bias, y.shape, y.dtype, sum_of_rows)


class GpuAttention(Attention):
    """Attention that in training adds no bias to keys, and that of values after the sum.

    A bias of the keys changes no weight: it adds the same to all logits of a query. The weights of
    a query add up to 1, so that the bias of the values can be added to the result. Then neither
    needs a sum over all tokens for its gradient. Dropout of the weights changes their sum.
    """

    def compute(self, x, context, relative, train, return_weights):
        """As Attention.compute."""
        if not train or self.dropout_rate:
            return super().compute(x, context, relative, train, return_weights)
        query = self.project(self.backend.dense, 'query', x)
        key, _ = self.without_bias('key', context)
        value, shift = self.without_bias('value', context)
        y, weights = self.attend(query, key, value, relative, train, return_weights)
        return self.joined(DenseOfShifted, y, shift), weights

    def without_bias(self, name, tokens):
        """The heads [batch, tokens, heads, head_dim] of a projection, and its bias."""
        y, bias = self.heads(DenseWithoutBias, name, tokens)
        return self.keep_heads(y), bias


def gelu(form: str, train: bool) -> Callable[[Array], Array]:
    """A function of xla.GELU, computed in float32 and rounded once, not after each operation.

    Without `train` the form tanh is xla's, which cuBLAS computes as a part of a product. Pooling by
    attention, which never drops anything, uses that form in training, too.
    """
    function = xla.GELU[form]
    if form == 'tanh':
        if not train:
            return function
        function = _gelu_by_sigmoid

    def rounded(x):
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return rounded


def _gelu_by_sigmoid(x):
    """xla.GELU['tanh']: (1 + tanh(z / 2)) / 2 is the sigmoid of z."""
    scale = np.float32(2 * np.sqrt(2 / np.pi))
    return x * _sigmoid(x * (scale + np.float32(0.044715) * scale * x * x))


@jax.custom_jvp
def _sigmoid(z):
    # On an H200 GELU takes 0.93 of the time with this root that it takes with a quotient.
    root = jax.lax.rsqrt(1 + jnp.exp(-z))
    return root * root


@_sigmoid.defjvp
def _sigmoid_tangent(z, tangent):
    y = _sigmoid(*z)
    return y, tangent[0] * y * (1 - y)


def remat_hidden(function: Callable) -> Callable:
    """Keeps only the products of an MLP and its dropout masks for the backward pass.

    That computes biases, GELU and dropout again, in the kernel that needs them.
    """
    kept = jax.checkpoint_policies
    policy = kept.save_from_both_policies(
        kept.dots_saveable, kept.save_only_these_names(gpu_dropout.MASKS)
    )
    return nn.remat(function, policy=policy)


def attend_by_cudnn(
    query: Array, key: Array, value: Array, bias: Array | None, tokens: int
) -> Array:
    """Self-attention without a bias by cuDNN, where `padding` adds nothing; XLA computes the rest.

    That of the class token alone costs little.
    """
    if query.shape != key.shape or bias is not None or padding(key.shape[1]):
        return xla.attend(query, key, value, bias, tokens)
    return jax.nn.dot_product_attention(
        query, key, value, bias, **xla.lengths(query, key, tokens), implementation='cudnn'
    )


def padding(tokens: int) -> int:
    """How many tokens, which nothing attends to, cuDNN needs in addition."""
    more = tokens % 2  # of an odd number JAX refuses gradients
    # cuDNN's may be NaN: github.com/pytorch/pytorch/issues/196678
    if (tokens + more) % 128 == 64:
        more += 2
    return more


def compiler_options() -> dict[str, Any]:
    """COMPILER_OPTIONS but those that XLA_FLAGS sets."""
    flags = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in COMPILER_OPTIONS.items() if name not in flags}


def beyond_cudnn(model: Mapping[str, Any]) -> list[str]:
    """What attention by cuDNN does not compute of a model, and what it expects instead.

    Args:
      model: the fields of `config.model`.
    """
    head = model['hidden_size'] // model['num_heads']
    limits = (
        (model['dtype'] == 'bfloat16', f'model.dtype {model["dtype"]}', 'bfloat16'),
        (head <= 128 and head % 8 == 0, f'heads of size {head}', '8, 16, ... or 128'),
        (model['attention'] == 'full', f'model.attention {model["attention"]}', 'full'),
        (model['position'] != 'relative', 'model.position relative', 'another'),
        (not model['attention_dropout_rate'], 'model.attention_dropout_rate', '0'),
    )
    return [f'{what} (expected {expected})' for fits, what, expected in limits if not fits]


def sum_of_rows(rows: Float[Array, 'rows numbers']) -> Float[Array, ' numbers']:
    """The float32 sum over the rows.

    The barrier gives the sum a kernel of its own. As a part of what computes the rows, it would
    slow down writing them.
    """
    return jax.lax.optimization_barrier(rows).sum(0, dtype=jnp.float32)
