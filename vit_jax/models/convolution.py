"""Convolutions whose gradients a CPU computes as fast as their values.

XLA for CPUs (jaxlib 0.10.1) rewrites the gradients of a convolution for its fast kernel, but not
inside a loop, such as the loop over the units of a ResNet or the parts of a batch. Inside a loop
the gradients take 15 to 60 times as long. This module writes them in the form that the fast kernel
needs. Other platforms compute the gradients that JAX derives.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
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
    """Convolves images by jax.lax.conv_general_dilated.

    Reverse-mode derivatives (jax.grad) of every order are supported, forward-mode derivatives
    (jax.jvp) are not.

    Args:
      x: images.
      kernel: the filters.
      strides: the strides along height and width.
      padding: 'SAME', 'VALID', or (low, high) for height and width.

    Returns:
      Images of x's dtype.
    """
    pads: Sequence[tuple[int, int]]
    if isinstance(padding, str):
        pads = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    else:
        pads = padding
    return _convolve(x, kernel, tuple(strides), tuple(map(tuple, pads)))


def _plain(x, kernel, strides, padding, **dilation):
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, dimension_numbers=LAYOUT, **dilation
    )


_convolve = jax.custom_vjp(_plain, nondiff_argnums=(2, 3))


def _forward(x, kernel, strides, padding):
    # Calls the primitive itself, because the policies in stack.REMAT_POLICIES look for it.
    return _plain(x, kernel, strides, padding), (x, kernel)


def _backward(strides, padding, residuals, gradient):
    x, kernel = residuals
    if _is_product(kernel, padding):
        of_x_on_cpu = _gradient_of_x_by_product
        of_kernel_on_cpu = _gradient_of_kernel_by_product
    else:
        of_x_on_cpu = _gradient_of_x_by_windows
        of_kernel_on_cpu = _gradient_of_kernel_by_windows
    settings = {'strides': strides, 'padding': padding}
    # In two conditions, so that XLA can remove an unused gradient, such as of the images.
    of_x = jax.lax.platform_dependent(
        x,
        kernel,
        gradient,
        cpu=functools.partial(of_x_on_cpu, **settings),
        default=functools.partial(_gradient_of_x, **settings),
    )
    of_kernel = jax.lax.platform_dependent(
        x,
        kernel,
        gradient,
        cpu=functools.partial(of_kernel_on_cpu, **settings),
        default=functools.partial(_gradient_of_kernel, **settings),
    )
    return of_x, of_kernel


_convolve.defvjp(_forward, _backward)


def _gradient_of_x(x, kernel, gradient, strides, padding):
    """The gradient that JAX derives."""
    transposed = jax.linear_transpose(lambda x: _plain(x, kernel, strides, padding), x)
    return transposed(gradient)[0]


def _gradient_of_kernel(x, kernel, gradient, strides, padding):
    """The gradient that JAX derives."""
    transposed = jax.linear_transpose(lambda kernel: _plain(x, kernel, strides, padding), kernel)
    return transposed(gradient)[0]


def _is_product(kernel, padding):
    """Whether the convolution is a matrix product."""
    return kernel.shape[:2] == (1, 1) and not any(map(any, padding))


def _gradient_of_x_by_product(x, kernel, gradient, strides, padding):
    """For a 1x1 convolution without padding."""
    rows, columns = strides
    of_strided_x = _product('bhwo,io->bhwi', gradient, kernel[0, 0]).astype(x.dtype)
    transposed = jax.linear_transpose(lambda x: x[:, ::rows, ::columns], x)
    return transposed(of_strided_x)[0]


def _gradient_of_kernel_by_product(x, kernel, gradient, strides, padding):
    """For a 1x1 convolution without padding."""
    rows, columns = strides
    of_kernel = _product('bhwi,bhwo->io', x[:, ::rows, ::columns], gradient)
    return of_kernel.astype(kernel.dtype)[None, None]


def _gradient_of_x_by_windows(x, kernel, gradient, strides, padding):
    """A convolution in the layout of the forward pass."""
    sides = kernel.shape[:2]
    before = [side - 1 - low for side, (low, _) in zip(sides, padding, strict=True)]
    return _plain(
        gradient,
        kernel[::-1, ::-1].swapaxes(2, 3),
        (1, 1),
        _pads(before, x.shape[1:3], _spread(gradient, strides), sides),
        lhs_dilation=strides,
    )


def _gradient_of_kernel_by_windows(x, kernel, gradient, strides, padding):
    """A convolution in the layout of the forward pass."""
    before = [low for low, _ in padding]
    of_kernel = _plain(
        x.transpose(3, 1, 2, 0),
        gradient.transpose(1, 2, 0, 3),
        (1, 1),
        _pads(before, kernel.shape[:2], x.shape[1:3], _spread(gradient, strides)),
        rhs_dilation=strides,
    )
    return of_kernel.transpose(1, 2, 0, 3)


def _spread(gradient, strides):
    """Height and width of a gradient after `stride` - 1 zeros are put between its entries."""
    sides = gradient.shape[1:3]
    return [(side - 1) * stride + 1 for side, stride in zip(sides, strides, strict=True)]


def _pads(low, output_size, input_size, window):
    """The (low, high) padding per axis, for given `low`, that gives `output_size` windows."""
    pads = []
    for before, outputs, inputs, size in zip(low, output_size, input_size, window, strict=True):
        after = outputs + size - 1 - inputs - before
        pads.append((before, after))
    return pads
