import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.backends import cpu_attention


def by_xla(*arrays):
    return jax.nn.dot_product_attention(*arrays, implementation='xla')


def arrays_of(batch, tokens, heads, size, dtype=np.float32, scale=1.0):
    """Query, key, both times `scale`, value and a gradient of the output."""
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
    """The same by NumPy, after equations 6 and 7 and their derivatives."""
    q, k, v, g = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key, value, gradient))
    scale = 1 / np.sqrt(q.shape[-1])
    logits = q @ k.swapaxes(2, 3) * scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = g @ v.swapaxes(2, 3)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    results = (weights @ v, of_logits @ k, of_logits.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ g)
    return [x.swapaxes(1, 2) for x in results]


@pytest.mark.parametrize(
    'shape',
    [(2, 5, 3, 4), (1, 1, 1, 1), (3, 1, 2, 8), (2, 17, 1, 16), (1, 33, 2, 6), (4, 10, 2, 3)],
)
def test_output_and_gradients_in_float32(shape):
    arrays = arrays_of(*shape)
    for a, b in zip(
        output_and_gradients(cpu_attention.attend, *arrays), in_float64(*arrays), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-7)


def test_large_logits_do_not_overflow():
    """Weights are 0 and 1 then, and gradients differences of nearly equal numbers."""
    arrays = arrays_of(2, 9, 2, 8, scale=30)
    for a, b in zip(
        output_and_gradients(cpu_attention.attend, *arrays), in_float64(*arrays), strict=True
    ):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_bfloat16_is_about_as_exact_as_by_xla():
    arrays = arrays_of(2, 65, 3, 32, jnp.bfloat16)
    exact = in_float64(*arrays)
    ours, xlas = (
        [
            np.linalg.norm(a - b)
            for a, b in zip(output_and_gradients(attend, *arrays), exact, strict=True)
        ]
        for attend in (cpu_attention.attend, by_xla)
    )
    assert ours[0] < 1.05 * xlas[0]
    assert np.linalg.norm(ours) < 1.3 * np.linalg.norm(xlas)
    assert all(error < 5e-3 * np.linalg.norm(b) for error, b in zip(ours, exact, strict=True))


@pytest.mark.slow
def test_every_small_shape_has_gradients_in_bfloat16():
    """Where XLA takes no kernel with float32 sums it ends with an error when a step runs."""
    for shape in itertools.product((1, 2), (1, 2, 7), (1, 3), (1, 4, 16)):
        arrays = arrays_of(*shape, jnp.bfloat16)
        for a, b in zip(
            output_and_gradients(cpu_attention.attend, *arrays), in_float64(*arrays), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max() + 0.02)
