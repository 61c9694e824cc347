"""Convolutions whose gradients a CPU computes as fast as their values.

XLA for CPUs (jaxlib 0.10.1) brings the gradients of a convolution into the form that its fast
kernel takes, but not within a loop: over the units of a ResNet, over the parts of a batch. There
they take 15 to 60 times as long. Here they are written in that form, on other platforms as JAX
derives them.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

LAYOUT = ('NHWC', 'HWIO', 'NHWC')
Padding = tuple[tuple[int, int], tuple[int, int]]
_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def convolve(
    x: Float[Array, 'batch height width in_features'],
    kernel: Float[Array, 'rows columns in_features features'],
    strides: tuple[int, int],
    padding: str | Padding,
) -> Float[Array, 'batch out_height out_width features']:
    """jax.lax.conv_general_dilated of images, channels last; the result has x's dtype."""
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    return _convolve(x, kernel, tuple(strides), tuple(map(tuple, padding)))


def _plain(x, kernel, strides, padding, **dilation):
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=LAYOUT, **dilation
    )


_convolve = jax.custom_jvp(_plain, nondiff_argnums=(2, 3))


@functools.partial(_convolve.defjvp, symbolic_zeros=True)
def _differentiate(strides, padding, primals, tangents):
    (x, kernel), (of_x, of_kernel) = primals, tangents
    terms = [
        _tangent.bind(*arguments, strides=strides, padding=padding)
        for arguments in ((of_x, kernel), (x, of_kernel))
        if not any(isinstance(each, SymbolicZero) for each in arguments)
    ]
    y = _plain(x, kernel, strides, padding)  # the primitive of stack.REMAT_POLICIES
    return y, functools.reduce(jnp.add, terms)


# Of a tangent, which is linear in one of the arguments: _plain, but for how it is transposed.
_tangent = Primitive('convolution_tangent')
_tangent.def_impl(_plain)
mlir.register_lowering(_tangent, mlir.lower_fun(_plain, multiple_results=False))


@_tangent.def_abstract_eval
def _shape(*arguments, **parameters):
    y = jax.eval_shape(functools.partial(_plain, **parameters), *arguments)
    return jax.core.ShapedArray(y.shape, y.dtype)


def _batch(arguments, axes, **parameters):
    return jax.vmap(functools.partial(_plain, **parameters), axes)(*arguments), 0


batching.primitive_batchers[_tangent] = _batch


def _transpose_x(gradient, x, kernel, strides, padding):
    """The gradient of x, of which only x.aval is known."""
    x = x.aval

    def by_pixels():
        found = _product('bhwo,io->bhwi', gradient, kernel[0, 0]).astype(x.dtype)
        return _transposed(lambda x: x[:, :: strides[0], :: strides[1]], x, found)

    def by_windows():
        low = [n - 1 - before for n, (before, _) in zip(kernel.shape[:2], padding, strict=True)]
        return _plain(
            gradient,
            kernel[::-1, ::-1].swapaxes(2, 3),
            (1, 1),
            _pads(low, x.shape[1:3], _spread(gradient, strides), kernel.shape[:2]),
            lhs_dilation=strides,
        )

    return jax.lax.platform_dependent(
        cpu=by_pixels if _of_pixels(kernel, padding) else by_windows,
        default=lambda: _transposed(lambda x: _plain(x, kernel, strides, padding), x, gradient),
    )


def _transpose_kernel(gradient, x, kernel, strides, padding):
    """The gradient of the kernel, of which only kernel.aval is known."""
    kernel = kernel.aval

    def by_pixels():
        return _product('bhwi,bhwo->io', x[:, :: strides[0], :: strides[1]], gradient).astype(
            kernel.dtype
        )[None, None]

    def by_windows():
        low = [before for before, _ in padding]
        return _plain(
            x.transpose(3, 1, 2, 0),
            gradient.transpose(1, 2, 0, 3),
            (1, 1),
            _pads(low, kernel.shape[:2], x.shape[1:3], _spread(gradient, strides)),
            rhs_dilation=strides,
        ).transpose(1, 2, 0, 3)

    return jax.lax.platform_dependent(
        cpu=by_pixels if _of_pixels(kernel, padding) else by_windows,
        default=lambda: _transposed(
            lambda kernel: _plain(x, kernel, strides, padding), kernel, gradient
        ),
    )


ad.defbilinear(_tangent, _transpose_x, _transpose_kernel)


def _of_pixels(kernel, padding):
    """Whether the convolution is a product of matrices."""
    return kernel.shape[:2] == (1, 1) and not any(map(any, padding))


def _transposed(linear, argument, gradient):
    return jax.linear_transpose(linear, argument)(gradient)[0]


def _spread(gradient, strides):
    """Height and width of a gradient with zeros between its entries."""
    return [(n - 1) * stride + 1 for n, stride in zip(gradient.shape[1:3], strides, strict=True)]


def _pads(low, out, given, window):
    """The padding, `low` before, with which a window leaves `out` places of those `given`."""
    return [
        (before, n + w - 1 - g - before)
        for before, n, g, w in zip(low, out, given, window, strict=True)
    ]
