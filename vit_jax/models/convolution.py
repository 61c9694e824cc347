"""Convolutions whose gradients a CPU computes as fast as their values.

XLA for CPUs (jaxlib 0.10.1) brings the gradients of a convolution into the form that its fast
kernel takes, but not within a loop: over the units of a ResNet, over the parts of a batch. There
they take 15 to 60 times as long. Here they are written in that form, on other platforms as JAX
derives them.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LAYOUT = ('NHWC', 'HWIO', 'NHWC')
Padding = tuple[tuple[int, int], tuple[int, int]]


def convolve(x: Float[Array, 'batch height width in_features'],
             kernel: Float[Array, 'rows columns in_features features'],
             strides: tuple[int, int], padding: str | Padding
             ) -> Float[Array, 'batch out_height out_width features']:
    """jax.lax.conv_general_dilated of images, channels last; the result has x's dtype."""
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    return _convolve(x, kernel, tuple(strides), tuple(map(tuple, padding)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x, kernel, strides, padding):
    return _plain(x, kernel, strides, padding)


def _plain(x, kernel, strides, padding, **dilation):
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=LAYOUT,
                                        **dilation)


def _forward(x, kernel, strides, padding):
    return _plain(x, kernel, strides, padding), (x, kernel)  # the primitive of stack.REMAT_POLICIES


def _backward(strides, padding, kept, gradient):
    of_pixels = kept[1].shape[:2] == (1, 1) and not any(map(any, padding))
    gradients = (_of_pixels if of_pixels else _of_windows)(*kept, gradient, strides, padding)
    derived = _derived(*kept, gradient, strides, padding)
    return tuple(jax.lax.platform_dependent(cpu=cpu, default=default)
                 for cpu, default in zip(gradients, derived, strict=True))


def _derived(x, kernel, gradient, strides, padding):
    """How to compute the gradients of x and of the kernel, each by itself, as JAX derives them."""
    def of_x():
        return jax.linear_transpose(lambda x: _plain(x, kernel, strides, padding), x)(gradient)[0]

    def of_kernel():
        return jax.linear_transpose(lambda kernel: _plain(x, kernel, strides, padding), kernel
                                    )(gradient)[0]

    return of_x, of_kernel


def _of_windows(x, kernel, gradient, strides, padding):
    """The same, as the convolutions into which XLA would transpose these."""
    low = [before for before, _ in padding]
    size, inputs = kernel.shape[:2], x.shape[1:3]
    spread = [(n - 1) * stride + 1 for n, stride in zip(gradient.shape[1:3], strides, strict=True)]

    def pads(low, out, given, window):  # so that `out` places are left
        return [(before, n + w - 1 - g - before)
                for before, n, g, w in zip(low, out, given, window, strict=True)]

    def of_x():
        before = [n - 1 - before for n, before in zip(size, low, strict=True)]
        return _plain(gradient, kernel[::-1, ::-1].swapaxes(2, 3), (1, 1),
                      pads(before, inputs, spread, size), lhs_dilation=strides)

    def of_kernel():
        return _plain(x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3), (1, 1),
                      pads(low, size, inputs, spread), rhs_dilation=strides
                      ).transpose(1, 2, 0, 3)

    return of_x, of_kernel


def _of_pixels(x, kernel, gradient, strides, padding):
    """The same of a 1x1 convolution without padding, as products of matrices."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def pixels(x):
        return x[:, ::strides[0], ::strides[1]]

    def of_x():
        found = product('bhwo,io->bhwi', gradient, kernel[0, 0]).astype(x.dtype)
        return jax.linear_transpose(pixels, x)(found)[0]

    def of_kernel():
        return product('bhwi,bhwo->io', pixels(x), gradient).astype(kernel.dtype)[None, None]

    return of_x, of_kernel


_convolve.defvjp(_forward, _backward)
