"""Layers in the form that an NVIDIA GPU computes fastest, and attention by cuDNN.

The gradient of a bias is a sum over the rows of a batch. On a GPU (jaxlib 0.11.2) XLA computes it
in bfloat16, with errors of 14 to 18 % in a small model. These layers compute it in float32.
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

# Options of XLA: cuBLAS alone computes matrix products, because it fuses the operations after them,
# and linear layers are not merged into one product. XLA's own kernels split the sum, and their
# autotuning ignores the time for adding the parts.
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
    """Dense without the addition of its bias."""

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens ...']):
        """Returns the product of `x` with the kernel, and the bias."""
        kernel, bias = dense_parameters(self, x)
        leading = x.shape[: leading_axes(self, x)]
        y = multiply(x.astype(self.dtype), kernel, bias.size, leading)
        return y.reshape(*leading, *bias.shape), bias


class DenseOfShifted(nn.DenseGeneral):
    """Applies Dense to an input plus a shift, which is the same for every token."""

    @nn.compact
    def __call__(  # type: ignore[override]  # with the argument shift
        self, x: Float[Array, 'batch tokens ...'], shift: Float[Array, '...']
    ) -> Float[Array, 'batch tokens ...']:
        """Returns Dense(x + shift), where `shift` has the shape of one token of x."""
        kernel, bias = dense_parameters(self, x)
        bias += jnp.tensordot(shift, kernel, shift.ndim)
        leading = x.shape[: leading_axes(self, x)]
        y = multiply(x.astype(self.dtype), kernel, bias.size, leading)
        y += broadcast(bias.reshape(-1), y.shape, y.dtype, sum_of_rows)
        return y.reshape(*leading, *bias.shape)


def multiply(x: Array, kernel: Array, columns: int, leading: tuple[int, ...]) -> Array:
    """Returns the product of x and kernel as a matrix product, [*leading, columns].

    cuBLAS fuses the addition of a bias only for the columns of a matrix.
    """
    return jnp.matmul(x.reshape(*leading, -1), kernel.astype(x.dtype).reshape(-1, columns))


class Patches(nn.Conv):
    """nn.Conv of patches that do not overlap, with the same parameters, as a 1x1 convolution.

    cuDNN's convolution of images with three channels takes twenty times as long (B/16, H200).
    """

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width channels']
    ) -> Float[Array, 'batch rows columns features']:
        x = cut_into_patches(images, patch_sides(self), self.dtype)
        kernel, bias = patch_parameters(self, images.shape[-1])
        # Not a matrix product, because then XLA makes the batch the last axis of all later arrays.
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
    """Attention that, in training, drops the keys' bias and adds the values' bias after the sum.

    A bias of the keys does not change the weights, because it adds the same number to all logits of
    a query. The weights of a query sum to 1, so the bias of the values can be added to the result.
    Neither gradient then needs a sum over all tokens. With dropout the weights no longer sum to 1,
    so the plain order is used.
    """

    def compute(self, x, context, relative, train, return_weights):
        """Equations 5 to 8, like Attention.compute."""
        if not train or self.dropout_rate:
            return super().compute(x, context, relative, train, return_weights)
        query = self.project(self.backend.dense, 'query', x)
        key, _ = self.without_bias('key', context)
        value, value_bias = self.without_bias('value', context)
        y, weights = self.attend(query, key, value, relative, train, return_weights)
        return self.output_layer(DenseOfShifted, x.shape[-1])(y, value_bias), weights

    def without_bias(self, name, tokens):
        """Returns keys or values [batch, tokens, heads, head_dim] without bias, and the bias."""
        layer = self.input_layer(DenseWithoutBias, name, tokens.shape[-1])
        y, bias = layer(tokens)
        return self.shard_heads(y), bias


def gelu(form: str, train: bool) -> Callable[[Array], Array]:
    """Returns a function of xla.GELU that computes in float32 and rounds only the result.

    Without `train`, the form tanh is the function of xla.py, which cuBLAS fuses into a matrix
    product. Attention pooling always passes train=False.
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
    """xla.GELU['tanh'], with sigmoid(z) = (1 + tanh(z / 2)) / 2."""
    scale = np.float32(2 * np.sqrt(2 / np.pi))
    return x * _sigmoid(x * (scale + np.float32(0.044715) * scale * x * x))


@jax.custom_jvp
def _sigmoid(z):
    # On an H200, GELU with this root takes 0.93 of the time of GELU with a quotient.
    root = jax.lax.rsqrt(1 + jnp.exp(-z))
    return root * root


@_sigmoid.defjvp
def _sigmoid_tangent(z, tangent):
    y = _sigmoid(*z)
    return y, tangent[0] * y * (1 - y)


def remat_hidden(function: Callable) -> Callable:
    """Wraps the hidden layer of an MLP, so that only its product and dropout mask are kept.

    The backward pass computes bias, GELU and dropout again, in the kernels that need them.
    """
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names(gpu_dropout.MASKS)
    )
    return nn.remat(function, policy=policy)


def attend_by_cudnn(
    query: Array, key: Array, value: Array, bias: Array | None, tokens: int
) -> Array:
    """Computes self-attention without a bias by cuDNN, if the tokens need no padding.

    XLA computes all other attention. This includes the attention of only the class token, which
    costs little.
    """
    if query.shape != key.shape or bias is not None or padding(key.shape[1]):
        return xla.attend(query, key, value, bias, tokens)
    return jax.nn.dot_product_attention(
        query, key, value, bias, **xla.lengths(query, key, tokens), implementation='cudnn'
    )


def padding(tokens: int) -> int:
    """Returns the number of further tokens that cuDNN needs; no token attends to them."""
    num_further = tokens % 2  # JAX supports no gradients for an odd number of tokens
    # Otherwise cuDNN's gradients may be NaN: github.com/pytorch/pytorch/issues/196678
    if (tokens + num_further) % 128 == 64:
        num_further += 2
    return num_further


def compiler_options() -> dict[str, Any]:
    """Returns COMPILER_OPTIONS, except options that XLA_FLAGS sets."""
    flags = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in COMPILER_OPTIONS.items() if name not in flags}


def beyond_cudnn(model: Mapping[str, Any]) -> list[str]:
    """Returns the properties of a model that cuDNN's attention does not support.

    Args:
      model: the fields of `config.model`.

    Returns:
      Texts such as 'model.dtype float32 (expected bfloat16)'; [] if it supports the model.
    """
    unsupported = []
    if model['dtype'] != 'bfloat16':
        unsupported.append(f'model.dtype {model["dtype"]} (expected bfloat16)')
    head_dim = model['hidden_size'] // model['num_heads']
    if head_dim > 128 or head_dim % 8:
        unsupported.append(f'heads of size {head_dim} (expected 8, 16, ... or 128)')
    if model['attention'] != 'full':
        unsupported.append(f'model.attention {model["attention"]} (expected full)')
    if model['position'] == 'relative':
        unsupported.append('model.position relative (expected another kind)')
    if model['attention_dropout_rate']:
        unsupported.append('model.attention_dropout_rate (expected 0)')
    return unsupported


def sum_of_rows(rows: Float[Array, 'rows numbers']) -> Float[Array, ' numbers']:
    """Returns the float32 sum over the rows.

    The barrier gives the sum its own kernel. Fused into the kernel that computes the rows, it would
    slow that kernel down.
    """
    return jax.lax.optimization_barrier(rows).sum(0, dtype=jnp.float32)
