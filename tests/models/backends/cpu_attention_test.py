"""Attention in the form for CPUs equals equations 6 and 7."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.backends import cpu_attention


def by_xla(*arrays):
    return jax.nn.dot_product_attention(*arrays, implementation='xla')


def arrays_of(batch, tokens, heads, size, dtype=np.float32, scale=1.0):
    """Query and key, multiplied by `scale`, value, and a gradient of the output."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(factor * rng.normal(size=(batch, tokens, heads, size)), dtype)
        for factor in (scale, scale, 1, 1)
    ]


def output_and_gradients(attend, query, key, value, gradient):
    def pull(query, key, value, gradient):
        y, back = jax.vjp(attend, query, key, value)
        return y, *back(gradient)

    return [np.asarray(x, np.float64) for x in jax.jit(pull)(query, key, value, gradient)]


def in_float64(query, key, value, gradient):
    """Output and gradients in NumPy, by equations 6 and 7 and their derivatives."""
    q, k, v, g = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key, value, gradient))
    scale = 1 / np.sqrt(q.shape[-1])
    logits = q @ k.swapaxes(2, 3) * scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = g @ v.swapaxes(2, 3)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    of_key = of_logits.swapaxes(2, 3) @ q
    of_value = weights.swapaxes(2, 3) @ g
    results = (weights @ v, of_logits @ k, of_key, of_value)
    return [x.swapaxes(1, 2) for x in results]


@pytest.mark.parametrize(
    'shape',
    [(2, 5, 3, 4), (1, 1, 1, 1), (3, 1, 2, 8), (2, 17, 1, 16), (1, 33, 2, 6), (4, 10, 2, 3)],
)
def test_output_and_gradients_equal_the_reference_in_float32(shape):
    arrays = arrays_of(*shape)
    for a, b in zip(
        output_and_gradients(cpu_attention.attend, *arrays), in_float64(*arrays), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-7)


def test_large_logits_do_not_overflow():
    """The weights are 0 and 1, and gradients are differences of nearly equal numbers."""
    arrays = arrays_of(2, 9, 2, 8, scale=30)
    for a, b in zip(
        output_and_gradients(cpu_attention.attend, *arrays), in_float64(*arrays), strict=True
    ):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_bfloat16_is_about_as_exact_as_xla():
    arrays = arrays_of(2, 65, 3, 32, jnp.bfloat16)
    exact = in_float64(*arrays)

    def errors(attend):
        results = output_and_gradients(attend, *arrays)
        return [np.linalg.norm(a - b) for a, b in zip(results, exact, strict=True)]

    cpu_errors = errors(cpu_attention.attend)
    xla_errors = errors(by_xla)
    assert cpu_errors[0] < 1.05 * xla_errors[0]
    assert np.linalg.norm(cpu_errors) < 1.3 * np.linalg.norm(xla_errors)
    for error, b in zip(cpu_errors, exact, strict=True):
        assert error < 5e-3 * np.linalg.norm(b)


@pytest.mark.slow
def test_every_small_shape_has_gradients_in_bfloat16():
    """XLA fails at run time for shapes without a kernel with float32 sums."""
    for shape in itertools.product((1, 2), (1, 2, 7), (1, 3), (1, 4, 16)):
        arrays = arrays_of(*shape, jnp.bfloat16)
        for a, b in zip(
            output_and_gradients(cpu_attention.attend, *arrays), in_float64(*arrays), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max() + 0.02)
