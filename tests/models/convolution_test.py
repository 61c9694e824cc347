"""Gradients of convolutions equal JAX's, in the form that XLA computes fast on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.programs import program_on, small_config
from vit_jax.models.convolution import LAYOUT, convolve

# Kernel, stride, padding and image. The last case is an embedding of patches with a remainder.
CASES = [
    ((1, 1), 1, 'SAME', (6, 5)),
    ((1, 1), 2, 'SAME', (6, 5)),
    ((1, 1), 1, [(1, 1)] * 2, (4, 4)),
    ((3, 3), 1, 'SAME', (6, 5)),
    ((3, 3), 2, 'SAME', (8, 7)),
    ((3, 3), 2, [(1, 1)] * 2, (8, 7)),
    ((7, 7), 2, [(3, 3)] * 2, (16, 15)),
    ((4, 2), (4, 2), 'VALID', (9, 7)),
]


def at_night(*numbers):
    return [pytest.param(CASES[number], marks=pytest.mark.nightly) for number in numbers]


def gradients(convolution, dtype, kernel, stride, padding, size):
    keys = jax.random.split(jax.random.key(0), 3)
    strides = (stride, stride) if isinstance(stride, int) else stride

    def normal(key, shape):  # the same numbers for both dtypes
        return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)

    y, backward = jax.vjp(
        lambda x, kernel: convolution(x, kernel, strides, padding),
        normal(keys[0], (3, *size, 4)),
        normal(keys[1], (*kernel, 4, 5)),
    )
    return y, *backward(normal(keys[2], y.shape))


def of_jax(x, kernel, strides, padding):
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=LAYOUT)


@pytest.mark.parametrize('case', [CASES[k] for k in (1, 5, 6, 7)] + at_night(0, 2, 3, 4), ids=str)
def test_gradients_equal_those_of_jax(case):
    for result, expected in zip(
        gradients(convolve, jnp.float32, *case), gradients(of_jax, jnp.float32, *case), strict=True
    ):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, atol=1e-5 * np.abs(expected).max())
    for result, expected in zip(
        gradients(convolve, jnp.bfloat16, *case), gradients(of_jax, jnp.float32, *case), strict=True
    ):
        assert result.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            result.astype(jnp.float32), expected, atol=1e-2 * np.abs(expected).max()
        )


@pytest.mark.parametrize('case', [CASES[5], *at_night(1, 7)], ids=str)
def test_higher_derivatives_equal_those_of_jax(case):
    """Reverse over reverse, forward over reverse, and vmap of reverse."""
    kernel, stride, padding, size = case
    strides = (stride, stride) if isinstance(stride, int) else stride
    keys = jax.random.split(jax.random.key(0), 4)
    primals, tangents = (
        (jax.random.normal(keys[i], (3, *size, 4)), jax.random.normal(keys[i + 1], (*kernel, 4, 5)))
        for i in (0, 2)
    )

    def of(convolution):
        def function(x, kernel):
            return jnp.sin(convolution(x, kernel, strides, padding))

        backward = jax.grad(lambda *arguments: function(*arguments).sum(), (0, 1))
        squares = jax.grad(lambda *arguments: sum(jnp.sum(g**2) for g in backward(*arguments)))
        each = jax.vmap(lambda x, kernel: backward(x[None], kernel), (0, None))
        return jax.jit(
            lambda: (
                squares(*primals),
                jax.jvp(backward, primals, tangents),
                each(*primals),
            )
        )()

    for result, expected in zip(*map(jax.tree.leaves, (of(convolve), of(of_jax))), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-5 * np.abs(expected).max())


def convolutions(text):
    """Returns the layouts of the convolutions in a compiled program."""
    return re.findall(r' convolution\(.*dim_labels=(\S+?)[,\s]', text)


@pytest.mark.parametrize('family', ['hybrid', pytest.param('resnet', marks=pytest.mark.slow)])
def test_convolutions_in_loops_have_the_fast_form(family):
    """Other forms take 15 to 60 times as long. Parts of a batch and residual units are loops."""
    program = program_on(small_config(family, accum_steps=2), data=1)
    assert set(convolutions(program.train_step.as_text())) == {'b01f_01io->b01f'}


def test_other_platforms_have_the_convolutions_that_jax_derives():
    """A CPU has other convolutions, which shows that the test can fail."""

    def lowered(convolution, platform):
        x = jnp.ones((2, 8, 8, 3))
        kernel = jnp.ones((3, 3, 3, 4))
        gradient = jax.grad(lambda x, kernel: convolution(x, kernel, (2, 2), 'SAME').sum(), (0, 1))
        text = jax.jit(gradient).trace(x, kernel).lower(lowering_platforms=(platform,)).as_text()
        return sorted(re.findall(r'stablehlo.convolution\([^)]*\)(.*)', text))

    assert lowered(convolve, 'tpu') == lowered(of_jax, 'tpu')
    assert lowered(convolve, 'cuda') == lowered(of_jax, 'cuda')
    assert lowered(convolve, 'cpu') != lowered(of_jax, 'cpu')
