"""Parameters and shapes of Flax's layers, for the backends that replace these layers."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dense_parameters(layer: nn.DenseGeneral, x: Float[Array, 'batch tokens ...']):
    """Returns (kernel, bias) of a layer over the last axes of x, like nn.DenseGeneral.

    Args:
      layer: the layer, which calls this function in its compact __call__.
      x: the input, with at least one leading axis.
    """
    inputs = x.shape[leading_axes(layer, x) :]
    features = feature_axes(layer)

    def kernel_init(key, shape, dtype):
        flat = (math.prod(inputs), math.prod(features))  # nn.DenseGeneral initialises a matrix
        return layer.kernel_init(key, flat, dtype).reshape(shape)

    kernel = layer.param('kernel', kernel_init, inputs + features, layer.param_dtype)
    bias = layer.param('bias', layer.bias_init, features, layer.param_dtype)
    return kernel, bias


def leading_axes(layer: nn.DenseGeneral, x: Array) -> int:
    """Returns the number of leading axes of x, which a layer does not contract."""
    num_contracted = 1 if isinstance(layer.axis, int) else len(layer.axis)
    return x.ndim - num_contracted


def feature_axes(layer: nn.DenseGeneral) -> tuple[int, ...]:
    """Returns the sizes of the last axes of a layer's output."""
    if isinstance(layer.features, int):
        return (layer.features,)
    return tuple(layer.features)


def cut_into_patches(
    images: Float[Array, 'batch height width channels'], patch_size: tuple[int, int], dtype
) -> Float[Array, 'batch rows columns numbers']:
    """Returns the whole patches of images as vectors of `dtype`."""
    height, width = patch_size
    channels = images.shape[-1]
    rows = images.shape[1] // height
    columns = images.shape[2] // width
    x = images[:, : rows * height, : columns * width].astype(dtype)
    x = x.reshape(-1, rows, height, columns, width, channels)
    return x.swapaxes(2, 3).reshape(-1, rows, columns, height * width * channels)


def patch_sides(layer: nn.Conv) -> tuple[int, int]:
    """Returns (height, width) of the patches of a layer."""
    assert not isinstance(layer.kernel_size, int)  # ViT passes two sides
    height, width = layer.kernel_size
    return height, width


def patch_parameters(layer: nn.Conv, channels: int):
    """Returns (kernel [numbers of a patch, features], bias or None) of a layer, like nn.Conv.

    Args:
      layer: the convolution, which calls this function in its compact __call__.
      channels: number of channels of the images.
    """
    height, width = patch_sides(layer)
    shape = (height, width, channels, layer.features)
    kernel = layer.param('kernel', layer.kernel_init, shape, layer.param_dtype)
    bias = None
    if layer.use_bias:
        bias = layer.param('bias', layer.bias_init, (layer.features,), layer.param_dtype)
    return kernel.reshape(height * width * channels, layer.features), bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def broadcast(
    x: Array, shape: tuple[int, ...], dtype, sum_of_rows: Callable[[Array], Array]
) -> Array:
    """Returns x.astype(dtype), repeated along the leading axes of `shape`.

    Args:
      x: the last axes of the result.
      shape: the shape of the result.
      dtype: its dtype; the gradient has x's dtype.
      sum_of_rows: maps [rows, numbers] to float32 sums [numbers], for the gradient.
    """
    return jnp.broadcast_to(x.astype(dtype), shape)


def _broadcast_forward(x, shape, dtype, sum_of_rows):
    return broadcast(x, shape, dtype, sum_of_rows), x


def _broadcast_backward(shape, dtype, sum_of_rows, x, gradient):
    sums = sum_of_rows(gradient.reshape(-1, x.size))
    return (sums.reshape(x.shape).astype(x.dtype),)


broadcast.defvjp(_broadcast_forward, _broadcast_backward)
