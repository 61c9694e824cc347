"""Parameters and shapes of Flax's layers, for backends that compute these layers themselves."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dense_parameters(layer: nn.DenseGeneral, x: Float[Array, 'batch tokens ...']):
    """(kernel, bias) of a layer over the last axes of x, created as nn.DenseGeneral creates them.

    Args:
      layer: inside of its compact __call__.
      x: the input, with one leading axis or more.
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
    """How many axes of x a layer keeps."""
    contracted = 1 if isinstance(layer.axis, int) else len(layer.axis)
    return x.ndim - contracted


def feature_axes(layer: nn.DenseGeneral) -> tuple[int, ...]:
    """The last axes of what a layer returns."""
    return (layer.features,) if isinstance(layer.features, int) else tuple(layer.features)


def cut_into_patches(
    images: Float[Array, 'batch height width channels'], patch_size: tuple[int, int], dtype
) -> Float[Array, 'batch rows columns numbers']:
    """Whole patches of images, the numbers of each side by side, as `dtype`."""
    height, width = patch_size
    channels = images.shape[-1]
    rows = images.shape[1] // height
    columns = images.shape[2] // width
    x = images[:, : rows * height, : columns * width].astype(dtype)
    x = x.reshape(-1, rows, height, columns, width, channels)
    return x.swapaxes(2, 3).reshape(-1, rows, columns, height * width * channels)


def patch_sides(layer: nn.Conv) -> tuple[int, int]:
    """(height, width) of the patches of a layer."""
    assert not isinstance(layer.kernel_size, int)  # models give two sides
    height, width = layer.kernel_size
    return height, width


def patch_parameters(layer: nn.Conv, channels: int):
    """(kernel [numbers of a patch, features], bias or None) of a convolution over patches.

    Created as nn.Conv creates them; `layer` is inside of its compact __call__.
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
    """x.astype(dtype), the same for every entry of the leading axes of `shape`.

    Its gradient has x's dtype. `sum_of_rows` computes it: from [rows, numbers] to the float32 sums
    [numbers].
    """
    return jnp.broadcast_to(x.astype(dtype), shape)


def _broadcast_forward(x, shape, dtype, sum_of_rows):
    return broadcast(x, shape, dtype, sum_of_rows), x


def _broadcast_backward(shape, dtype, sum_of_rows, x, gradient):
    sums = sum_of_rows(gradient.reshape(-1, x.size))
    return (sums.reshape(x.shape).astype(x.dtype),)


broadcast.defvjp(_broadcast_forward, _broadcast_backward)
