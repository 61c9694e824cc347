"""Layers in the form that a CPU computes fastest in bfloat16.

These facts about XLA's kernels for CPUs (jaxlib 0.10.1) explain the form:

- A product of bfloat16 matrices with a bfloat16 result takes twice as long as the same product with
  a float32 result that is rounded afterwards.
- Each rounding takes seven operations, so a bias is added before it.
- Convolutions are computed in float32.
- The gradient of every bias and scale is a sum over the rows of a batch. XLA's sum takes several
  times as long as a product with ones.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.backends import cpu_attention, xla
from vit_jax.models.backends.layers import (
    broadcast,
    cut_into_patches,
    dense_parameters,
    feature_axes,
    leading_axes,
    patch_parameters,
    patch_sides,
)

ROWS = 8  # rows of ones; with fewer rows XLA computes vector products, ten times as slowly
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Dense(nn.DenseGeneral):
    """nn.DenseGeneral over the last axes of its input, with the same parameters."""

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens ...']) -> Float[Array, 'batch tokens ...']:
        kernel, bias = dense_parameters(self, x)
        leading = leading_axes(self, x)
        rows = 'abcd'[:leading]
        summed = 'wxyz'[: x.ndim - leading]
        columns = 'mnop'[: len(feature_axes(self))]
        axes = f'{rows}{summed},{summed}{columns}->{rows}{columns}'
        return product(axes, x.astype(self.dtype), kernel, bias)


class Patches(nn.Conv):
    """nn.Conv of patches that do not overlap, with the same parameters, as a product."""

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width channels']
    ) -> Float[Array, 'batch rows columns features']:
        x = cut_into_patches(images, patch_sides(self), self.dtype)
        kernel, bias = patch_parameters(self, images.shape[-1])
        return product('abcw,wm->abcm', x, kernel, bias)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last axis, in float32, with the same parameters."""

    @nn.compact
    def __call__(  # type: ignore[override]  # without the argument mask
        self, x: Float[Array, '*batch hidden']
    ) -> Float[Array, '*batch hidden']:
        normalise = nn.LayerNorm(
            epsilon=self.epsilon, use_scale=False, use_bias=False, dtype=jnp.float32
        )
        y = normalise(x)
        scale = self.param('scale', self.scale_init, x.shape[-1:], self.param_dtype)
        bias = self.param('bias', self.bias_init, x.shape[-1:], self.param_dtype)
        y *= broadcast(scale, y.shape, y.dtype, sum_of_rows)
        y += broadcast(bias, y.shape, y.dtype, sum_of_rows)
        return y.astype(self.dtype)


def gelu(form: str, train: bool) -> Callable[[Array], Array]:
    """Returns a function of xla.GELU that computes in float32 and rounds only the result.

    The backward pass computes the function again.
    """
    function = xla.GELU[form]

    def rounded(x):
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return jax.checkpoint(rounded)


def attend(query: Array, key: Array, value: Array, bias: Array | None, tokens: int) -> Array:
    """Computes self-attention without a bias by cpu_attention, and everything else by XLA."""
    if query.shape == key.shape and bias is None:
        return cpu_attention.attend(query, key, value)
    return xla.attend(query, key, value, bias, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(axes: str, a: Array, b: Array, bias: Array | None = None) -> Array:
    """Returns jnp.einsum(axes, a, b) + bias, with one rounding.

    The sum is float32 and includes the bias. Gradients are products of the same kind.

    Args:
      axes: the axes of both factors and of the result, as in jnp.einsum.
      a: the first factor. The result has its dtype.
      b: the second factor, which is rounded to a's dtype. Its gradient has its own dtype.
      bias: added to the result, or None. Its gradient has its own dtype.
    """
    y = _einsum(axes, a, b.astype(a.dtype))
    if bias is not None:
        y = y + bias
    return y.astype(a.dtype)


def _product_forward(axes, a, b, bias=None):
    return product(axes, a, b, bias), (a, b, bias)


def _product_backward(axes, residuals, gradient):
    a, b, bias = residuals
    left, right, out = axes.replace('->', ',').split(',')
    of_a = _einsum(f'{out},{right}->{left}', gradient, b.astype(a.dtype)).astype(a.dtype)
    of_b = _einsum(f'{left},{out}->{right}', a, gradient).astype(b.dtype)
    of_bias = None
    if bias is not None:
        sums = sum_of_rows(gradient.reshape(-1, bias.size))
        of_bias = sums.reshape(bias.shape).astype(bias.dtype)
    return of_a, of_b, of_bias


product.defvjp(_product_forward, _product_backward)


def sum_of_rows(rows: Float[Array, 'rows numbers']) -> Float[Array, ' numbers']:
    """Returns the float32 sum over the rows, by a product with ones."""
    ones = jnp.ones((ROWS, len(rows)), rows.dtype)
    return jnp.matmul(ones, rows, preferred_element_type=jnp.float32)[0]
