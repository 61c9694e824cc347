"""Linear layers, LayerNorm, GELU: Flax's, or in the form that a CPU or a GPU computes fastest.

The form for CPUs is one for bfloat16. With XLA's kernels for CPUs (jaxlib 0.10.1) a product of
bfloat16 matrices with a bfloat16 result runs at half the speed of the same with a float32 result,
rounded afterwards, to which the bias is added before, as each rounding takes seven operations; a
convolution is computed in float32; and a sum over the rows of a batch, the gradient of every bias
and scale, takes several times as long as a product with ones. On a GPU (jaxlib 0.11.2) XLA adds up
these rows in bfloat16, with errors of 14 to 18 % in a small model.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.convolution import convolve
from vit_jax.models.dropout import MASKS

KERNELS = ('auto', 'xla', 'cpu', 'gpu')  # auto: as xla, where training/chosen.py does not choose
GELU = {
    'tanh': functools.partial(nn.gelu, approximate=True),  # Google's code
    'erf': functools.partial(nn.gelu, approximate=False),  # timm and Hugging Face
    'quick': lambda x: x * nn.sigmoid(1.702 * x),  # OpenAI's CLIP
}
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
ROWS = 8  # of ones: a product with fewer is computed vector by vector, ten times as slowly


def dense(kernel: str) -> type[nn.Module]:
    """nn.DenseGeneral, computed by one of KERNELS."""
    return {'cpu': CpuDense, 'gpu': GpuDense}.get(kernel, nn.DenseGeneral)


def layer_norm(kernel: str) -> type[nn.Module]:
    """nn.LayerNorm, computed by one of KERNELS."""
    return CpuLayerNorm if kernel == 'cpu' else nn.LayerNorm


def gelu(kernel: str, form: str, train: bool = True) -> Callable[[Array], Array]:
    """One of GELU, computed by one of KERNELS.

    By `cpu` and `gpu` it is computed in float32 and rounded once, not after each operation. By
    `cpu` the backward pass computes it again from its argument; by `gpu` see `remat_mlp`. By `gpu`
    without `train` the form tanh is that of `xla`, which cuBLAS computes as a part of a product.
    Pooling by attention, which never drops anything, takes that in training, too.
    """
    function = GELU[form]
    if kernel == 'gpu' and form == 'tanh':
        if not train:
            return function
        function = _gelu_by_sigmoid

    def rounded(x):
        return function(x.astype(jnp.float32)).astype(x.dtype)

    return {'cpu': jax.checkpoint(rounded), 'gpu': rounded}.get(kernel, function)


def _gelu_by_sigmoid(x):
    """GELU['tanh']: (1 + tanh(z / 2)) / 2 is the sigmoid of z."""
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


def remat_mlp(kernel: str, function: Callable[..., Array]) -> Callable[..., Array]:
    """A function (module, x), between whose product and result by `gpu` only masks are kept.

    The backward pass computes biases, GELU and dropout again, in the kernel that needs them.
    """
    kept = jax.checkpoint_policies
    return (
        function
        if kernel != 'gpu'
        else nn.remat(
            function,
            policy=kept.save_from_both_policies(
                kept.dots_saveable, kept.save_only_these_names(MASKS)
            ),
        )
    )


def patches(kernel: str) -> Callable[..., nn.Module]:
    """nn.Conv of patches that do not overlap, computed by one of KERNELS."""
    return {'cpu': CpuPatches, 'gpu': GpuPatches}.get(
        kernel, functools.partial(nn.Conv, conv_general_dilated_cls=lambda: _convolve)
    )


def _convolve(x, kernel, strides, padding, **_):  # dilations and groups, which patches lack
    return convolve(x, kernel, strides, padding)


def _patches_and_parameters(layer, images):
    """([batch, rows, columns, numbers of a patch], kernel [numbers of a patch, features], bias)."""
    (height, width), channels = layer.kernel_size, images.shape[-1]
    kernel = layer.param(
        'kernel', layer.kernel_init, (height, width, channels, layer.features), layer.param_dtype
    )
    bias = (
        layer.param('bias', layer.bias_init, (layer.features,), layer.param_dtype)
        if layer.use_bias
        else None
    )
    rows, columns = images.shape[1] // height, images.shape[2] // width
    x = (
        images[:, : rows * height, : columns * width]
        .astype(layer.dtype)
        .reshape(-1, rows, height, columns, width, channels)
    )
    numbers = height * width * channels
    return (
        x.swapaxes(2, 3).reshape(-1, rows, columns, numbers),
        kernel.reshape(numbers, layer.features),
        bias,
    )


class CpuPatches(nn.Conv):
    """nn.Conv of patches that do not overlap, with the same parameters, as a product."""

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width channels']
    ) -> Float[Array, 'batch rows columns features']:
        return product('abcw,wm->abcm', *_patches_and_parameters(self, images))


class GpuPatches(nn.Conv):
    """nn.Conv of patches that do not overlap, with the same parameters, as a 1x1 convolution.

    cuDNN's convolution of images of three channels takes twenty times as long (B/16 on an H200).
    """

    @nn.compact
    def __call__(
        self, images: Float[Array, 'batch height width channels']
    ) -> Float[Array, 'batch rows columns features']:
        x, kernel, bias = _patches_and_parameters(self, images)
        # No product of matrices: XLA would lay out all that follows with the images side by side.
        y = jax.lax.conv_general_dilated(
            x,
            kernel.astype(self.dtype)[None, None],
            (1, 1),
            'VALID',
            dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        )
        return y if bias is None else y + broadcast(bias, y.shape, y.dtype, 'gpu')


class CpuDense(nn.DenseGeneral):
    """nn.DenseGeneral over the last axes of its input, with the same parameters."""

    @nn.compact
    def __call__(self, x: Float[Array, 'batch tokens ...']) -> Float[Array, 'batch tokens ...']:
        axes, kernel, bias = _parameters(self, x)
        return product(axes, x.astype(self.dtype), kernel, bias)


class GpuDense(nn.DenseGeneral):
    """nn.DenseGeneral over the last axes of its input, with the same parameters."""

    return_bias: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, 'batch tokens ...'], shift: Array | None = None
    ) -> Float[Array, 'batch tokens ...'] | tuple[Array, Array]:
        """Returns y, or with `return_bias` (y without the bias, bias).

        `shift`, of the shape of one token of x, is what x lacks.
        """
        _, kernel, bias = _parameters(self, x)
        if shift is not None:
            bias += jnp.tensordot(shift, kernel, shift.ndim)
        # Of matrices, because cuBLAS adds no other bias on the way than that of their columns.
        leading = x.shape[: x.ndim + bias.ndim - kernel.ndim]
        y = jnp.matmul(
            x.astype(self.dtype).reshape(*leading, -1),
            kernel.astype(self.dtype).reshape(-1, bias.size),
        )
        if not self.return_bias:
            y += broadcast(bias.reshape(-1), y.shape, y.dtype, 'gpu')
        y = y.reshape(*leading, *bias.shape)
        return (y, bias) if self.return_bias else y


def _parameters(layer, x):
    """(axes of the product for einsum, kernel, bias) of a layer; x as in its __call__."""
    features = (layer.features,) if isinstance(layer.features, int) else tuple(layer.features)
    leading = x.ndim - (1 if isinstance(layer.axis, int) else len(layer.axis))
    inputs = x.shape[leading:]

    def kernel_init(key, shape, dtype):  # Flax's sees a matrix
        flat = math.prod(inputs), math.prod(features)
        return layer.kernel_init(key, flat, dtype).reshape(shape)

    kernel = layer.param('kernel', kernel_init, inputs + features, layer.param_dtype)
    bias = layer.param('bias', layer.bias_init, features, layer.param_dtype)
    rows, summed, columns = 'abcd'[:leading], 'wxyz'[: len(inputs)], 'mnop'[: len(features)]
    return f'{rows}{summed},{summed}{columns}->{rows}{columns}', kernel, bias


class CpuLayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last axis, in float32, with the same parameters."""

    @nn.compact
    def __call__(self, x: Float[Array, '*batch hidden']) -> Float[Array, '*batch hidden']:
        y = nn.LayerNorm(epsilon=self.epsilon, use_scale=False, use_bias=False, dtype=jnp.float32)(
            x
        )
        scale = self.param('scale', self.scale_init, x.shape[-1:], self.param_dtype)
        bias = self.param('bias', self.bias_init, x.shape[-1:], self.param_dtype)
        y *= broadcast(scale, y.shape, y.dtype, 'cpu')
        y += broadcast(bias, y.shape, y.dtype, 'cpu')
        return y.astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(axes: str, a: Array, b: Array, bias: Array | None = None) -> Array:
    """jnp.einsum(axes, a, b) + bias, of a's dtype, to which `b` is rounded.

    It is summed in float32, with the bias, and rounded once. Gradients are products of the same
    kind. Those of `b` and `bias` are rounded only where these are not float32.
    """
    y = _einsum(axes, a, b.astype(a.dtype))
    return (y if bias is None else y + bias).astype(a.dtype)


def _product_forward(axes, a, b, bias=None):
    return product(axes, a, b, bias), (a, b, bias)


def _product_backward(axes, kept, gradient):
    a, b, bias = kept
    left, right, out = axes.replace('->', ',').split(',')
    return (
        _einsum(f'{out},{right}->{left}', gradient, b.astype(a.dtype)).astype(a.dtype),
        _einsum(f'{left},{out}->{right}', a, gradient).astype(b.dtype),
        None if bias is None else _sum_of_rows(gradient, bias, 'cpu'),
    )


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def broadcast(x: Array, shape: tuple[int, ...], dtype, kernel: str) -> Array:
    """x.astype(dtype), the same for every entry of the leading axes of `shape`.

    Its gradient, of x's dtype, is summed in float32: by a product with ones for the kernel `cpu`.
    """
    return jnp.broadcast_to(x.astype(dtype), shape)


def _broadcast_forward(x, shape, dtype, kernel):
    return broadcast(x, shape, dtype, kernel), x


def _broadcast_backward(shape, dtype, kernel, x, gradient):
    return (_sum_of_rows(gradient, x, kernel),)


def _sum_of_rows(gradient, x, kernel):
    rows = gradient.reshape(-1, x.size)
    if kernel == 'cpu':
        sums = jnp.matmul(
            jnp.ones((ROWS, len(rows)), rows.dtype), rows, preferred_element_type=jnp.float32
        )[0]
    else:
        # The barrier gives the sum a kernel of its own. As part of what computes the rows, it would
        # slow down writing them.
        sums = jax.lax.optimization_barrier(rows).sum(0, dtype=jnp.float32)
    return sums.reshape(x.shape).astype(x.dtype)


broadcast.defvjp(_broadcast_forward, _broadcast_backward)
