"""Attention, and the kernels that compute it."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.models import attention
from vit_jax.models.backends import gpu, registry


def test_attention_dropout_acts_on_the_weights():
    """A rate below the resolution drops nothing; a larger rate acts in training."""
    images = random_images(2, 8, 8, 3)
    fields = dict(position='relative', position_at='every_layer')
    params = {'params': randomised(models.build(SMALL, 5, **fields), images)}

    def logits(rate, train):
        model = models.build(SMALL, 5, attention_dropout_rate=rate, **fields)
        return apply(model, params, images, train=train, rngs={'dropout': jax.random.key(1)})

    expected = logits(0.0, False)
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(1e-9, True), expected, atol=tolerance)
    np.testing.assert_array_equal(logits(0.5, False), expected)
    assert np.abs(logits(0.5, True) - expected).max() > 100 * tolerance


def test_weights_equal_those_of_fused_attention():
    query = random_images(2, 4, 3, 8, seed=0)
    key = 3 * random_images(2, 5, 3, 8, seed=1)
    value = random_images(2, 5, 3, 8, seed=2)
    bias = random_images(2, 3, 4, 5)
    weights = attention.attention_weights(query, key, bias)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        jnp.einsum('bhqk,bkhd->bqhd', weights, value),
        jax.nn.dot_product_attention(query, key, value, bias),
        atol=1e-5,
    )


def loss_and_gradients(function, *args):
    """Returns the sum of the squared outputs of a function, and its gradients."""
    return jax.jit(jax.value_and_grad(lambda args: (function(*args) ** 2).sum()))(args)


def assert_all_close(results, expected, rounding=1e-8):
    """Asserts near equality; the gradient by the bias of keys is ignored as rounding error."""
    rounding *= max(np.abs(x).max() for x in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + rounding),
        results,
        expected,
    )


def layer(kernel, **fields):
    """Returns attention with two heads, computed by a kernel."""
    return attention.Attention(2, 0.0, 'float32', registry.get(kernel, 'xla'), **fields)


def by_jax(params, x, context):
    """Computes the layer with JAX's function for attention."""

    def project(name, tokens):
        return jnp.einsum('btd,dhk->bthk', tokens, params[name]['kernel']) + params[name]['bias']

    query = project('query', x)
    key = project('key', context)
    value = project('value', context)
    y = jax.nn.dot_product_attention(query, key, value, implementation='xla')
    return jnp.einsum('bthk,hkd->btd', y, params['out']['kernel']) + params['out']['bias']


@pytest.fixture
def cudnn_calls(monkeypatch):
    """The shapes of the queries of calls of cuDNN; XLA computes them, because cuDNN needs a GPU."""
    calls = []
    by_xla = jax.nn.dot_product_attention

    def replacement(query, key, value, bias=None, *, implementation, **lengths):
        if implementation == 'cudnn':
            assert bias is None
            assert query.shape == key.shape
            calls.append(query.shape)
        return by_xla(query, key, value, bias, implementation='xla', **lengths)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', replacement)
    return calls


@functools.cache
def expected_of_jax(queries, tokens):
    """Queries, context, parameters of a layer, and the loss and gradients of `by_jax`."""
    x = random_images(2, queries, 16)
    context = random_images(2, tokens, 16, seed=2)
    init = functools.partial(layer('xla').init, context=context)
    params = randomised(types.SimpleNamespace(init=init), x)
    return x, context, params, loss_and_gradients(by_jax, params, x, context)


@pytest.mark.parametrize('kernel', ['xla', 'cudnn'])
@pytest.mark.parametrize(
    ('queries', 'tokens', 'padded_tokens'),
    [(6, 6, 6), (5, 5, 6), (1, 5, None), (64, 64, 66), (191, 191, 194), (128, 128, 128)],
)
def test_kernels_have_equal_outputs_and_gradients(
    kernel, queries, tokens, padded_tokens, cudnn_calls
):
    """cuDNN computes only self-attention, with a number of tokens that it supports."""
    x, context, params, expected = expected_of_jax(queries, tokens)
    module = layer(kernel, tokens=tokens)
    cudnn_calls.clear()
    uses_cudnn = kernel == 'cudnn' and padded_tokens is not None
    padding = gpu.padding(tokens) if uses_cudnn else 0

    def attend_with_padding(params, *inputs):
        inputs = (jnp.pad(y, ((0, 0), (0, padding), (0, 0))) for y in inputs)
        y, _ = module.apply({'params': params}, *inputs)
        return y[:, :queries]

    loss = loss_and_gradients(attend_with_padding, params, x, context)
    assert cudnn_calls == ([(2, padded_tokens, 2, 8)] if uses_cudnn else [])
    assert_all_close(loss, expected)


@pytest.mark.parametrize('tokens', [5, 64, 191])
def test_cudnn_is_not_called_without_the_padding_that_it_needs(tokens, cudnn_calls):
    """Tokens are not padded if a caller needs the weights of every layer."""
    x = random_images(2, tokens, 16)
    module = layer('cudnn')
    module.apply(module.init(jax.random.key(0), x, x), x, x)
    assert not cudnn_calls


@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        dict(pool='map'),
        dict(pool='gap', num_registers=1),
    ],
    ids=str,
)
def test_a_model_calls_its_kernel(fields, cudnn_calls):
    """Every layer calls it, except for the single query of the last layer or of the pooling."""
    images = random_images(2, 8, 12, 3)
    has_prefix = 'pool' not in fields or 'num_registers' in fields
    tokens = 8 if has_prefix else 6  # 6 patches, or 7 tokens that are padded to 8
    build = functools.partial(models.build, SMALL, 5, dtype='bfloat16', unroll=1, **fields)
    params = {'params': randomised(build(), images)}
    expected = apply(build(), params, images, train=True)
    assert not cudnn_calls
    logits = apply(build(attention_kernel='cudnn'), params, images, train=True)
    assert set(cudnn_calls) == {(2, tokens, 4, 8)}
    np.testing.assert_allclose(logits, expected, atol=0.02 * np.abs(expected).max())


# A width of 8 pixels gives an even number of patches and 20 an odd one. Most of them need padding.
@pytest.mark.parametrize(
    ('fields', 'width'),
    [
        *(
            pytest.param(fields, width, marks=pytest.mark.slow)
            for fields, width in (
                (dict(pool='map'), 20),
                (dict(), 8),
                (dict(pool='none', unroll=3, remat_policy='products'), 20),
            )
        ),
        *(
            pytest.param(fields, width, marks=[pytest.mark.slow, pytest.mark.nightly])
            for fields, width in (
                (dict(), 20),
                (dict(pool='gap'), 8),
                (dict(position_at='every_layer'), 8),
                (dict(position_at='shared'), 8),
                (dict(pool='gap', layer_norm_epsilon=0), 20),
            )
        ),
    ],
    ids=str,
)
def test_kernels_of_a_gpu_have_equal_outputs_and_gradients(fields, width, cudnn_calls):
    """This holds with and without `train`."""
    images = random_images(2, 12, width, 3)
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, images)

    def by(kernel, *modes):  # in float32, which models.build refuses for cuDNN
        linear_kernel = 'gpu' if kernel == 'cudnn' else kernel
        fields = dataclasses.replace(
            model.fields, attention_kernel=kernel, linear_kernel=linear_kernel
        )
        model_by_kernel = model.clone(fields=fields)

        def logits(params):
            return jnp.stack(
                [model_by_kernel.apply({'params': params}, images, train=train) for train in modes]
            )

        return loss_and_gradients(logits, params)

    # Without dropout, `train` makes no difference for XLA. The sum of both is twice the result.
    expected = jax.tree.map(lambda x: 2 * x, by('xla', False))
    loss = by('cudnn', True, False)
    assert cudnn_calls
    assert all(tokens % 2 == 0 for _, tokens, *_ in cudnn_calls)
    assert_all_close(loss, expected, rounding=1e-7)


@pytest.mark.slow
def test_dropout_with_padded_tokens(cudnn_calls):
    """Padding changes the random numbers. Without padding the result equals XLA's."""

    def by(kernel, width):
        model = models.build(SMALL, 5, dropout_rate=0.2, pool='gap', linear_kernel='gpu')
        model = model.clone(fields=dataclasses.replace(model.fields, attention_kernel=kernel))
        images = random_images(2, 12, width, 3)
        return loss_and_gradients(
            lambda params: model.apply(
                {'params': params}, images, train=True, rngs={'dropout': jax.random.key(2)}
            ),
            randomised(model, images),
        )

    assert_all_close(by('cudnn', 16), by('xla', 16), rounding=1e-7)
    padded = by('cudnn', 20)
    plain = by('xla', 20)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(padded))
    assert abs(padded[0] - plain[0]) < 0.5 * plain[0]


def test_jax_refuses_cudnn_without_a_gpu():
    """JAX refuses before lowering, so tests cannot lower programs with cuDNN."""
    x = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(RuntimeError, match='cuDNN is not detected'):
        jax.nn.dot_product_attention(x, x, x, implementation='cudnn')


@pytest.mark.parametrize(
    'fields',
    [
        dict(dtype='float32'),
        dict(hidden_size=1024),  # heads of size 256
        dict(num_heads=8),  # heads of size 4
        dict(attention='axial', pool='gap'),
        dict(position='relative', position_at='every_layer'),
        dict(attention_dropout_rate=0.1),
    ],
    ids=str,
)
def test_models_that_cudnn_does_not_support_are_refused(fields):
    fields = SMALL | dict(dtype='bfloat16') | fields
    models.build(fields | dict(attention_kernel='xla'), 5)
    models.build(SMALL | dict(dtype='bfloat16', attention_kernel='cudnn'), 5)
    with refused(kind='value', field='model.attention_kernel', value='cudnn'):
        models.build(fields | dict(attention_kernel='cudnn'), 5)


def test_the_message_names_the_fields_that_a_kernel_does_not_support():
    with refused(kind='value') as error:
        models.build(SMALL, 5, dtype='float32', num_heads=8, attention_kernel='cudnn')
    assert str(error.value) == (
        'model.attention_kernel is cudnn, which does not support model.dtype float32 (expected '
        'bfloat16), heads of size 4 (expected 8, 16, ... or 128). Change these fields, or set '
        'model.attention_kernel to xla.'
    )
