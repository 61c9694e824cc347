import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import attention
from vit_jax.models.backends import gpu, registry


def test_attention_dropout_acts_on_the_weights():
    """A rate too small to drop anything gives the fused path; a larger one acts in training."""
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


def test_weights_are_those_that_the_fused_path_uses():
    query, key, value = (
        random_images(2, tokens, 3, 8, seed=seed) for seed, tokens in enumerate((4, 5, 5))
    )
    key, bias = 3 * key, random_images(2, 3, 4, 5)
    weights = attention.attention_weights(query, key, bias)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        jnp.einsum('bhqk,bkhd->bqhd', weights, value),
        jax.nn.dot_product_attention(query, key, value, bias),
        atol=1e-5,
    )


def loss_and_gradients(function, *args):
    """Of the squares of what it returns, and so of every number of it."""
    return jax.jit(jax.value_and_grad(lambda args: (function(*args) ** 2).sum()))(args)


def assert_all_close(found, expected, rounding=1e-8):
    """But for rounding in a gradient that is zero: adding a vector to all keys changes nothing."""
    rounding *= max(np.abs(x).max() for x in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + rounding),
        found,
        expected,
    )


def layer(kernel, **fields):
    """Attention of two heads by an attention_kernel."""
    return attention.Attention(2, 0.0, 'float32', registry.get(kernel, 'xla'), **fields)


def by_jax(params, x, context):
    """The same layer, written with the function of JAX."""
    query, key, value = (
        jnp.einsum('btd,dhk->bthk', tokens, params[name]['kernel']) + params[name]['bias']
        for name, tokens in (('query', x), ('key', context), ('value', context))
    )
    y = jax.nn.dot_product_attention(query, key, value, implementation='xla')
    return jnp.einsum('bthk,hkd->btd', y, params['out']['kernel']) + params['out']['bias']


@pytest.fixture
def asked(monkeypatch):
    """What cuDNN is asked for, by the queries' shape; XLA computes it, as cuDNN needs a GPU."""
    calls, by_xla = [], jax.nn.dot_product_attention

    def stand_in(query, key, value, bias=None, *, implementation, **lengths):
        if implementation == 'cudnn':
            assert bias is None
            assert query.shape == key.shape
            calls.append(query.shape)
        return by_xla(query, key, value, bias, implementation='xla', **lengths)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', stand_in)
    return calls


@functools.cache
def of_jax(queries, tokens):
    """(Queries, context, parameters of a layer, what `by_jax` makes of them)."""
    x, context = random_images(2, queries, 16), random_images(2, tokens, 16, seed=2)
    init = functools.partial(layer('xla').init, context=context)
    params = randomised(types.SimpleNamespace(init=init), x)
    return x, context, params, loss_and_gradients(by_jax, params, x, context)


@pytest.mark.parametrize('kernel', ['xla', 'cudnn'])
@pytest.mark.parametrize(
    ('queries', 'tokens', 'expected'),
    [(6, 6, 6), (5, 5, 6), (1, 5, None), (64, 64, 66), (191, 191, 194), (128, 128, 128)],
)
def test_kernels_compute_the_same(kernel, queries, tokens, expected, asked):
    """Outputs and gradients. cuDNN gets self-attention only, and no number that it fails with."""
    x, context, params, by_itself = of_jax(queries, tokens)
    module = layer(kernel, tokens=tokens)
    asked.clear()

    def filled_up(params, *inputs):
        more = gpu.padding(tokens) if kernel == 'cudnn' and expected else 0
        inputs = (jnp.pad(y, ((0, 0), (0, more), (0, 0))) for y in inputs)
        return module.apply({'params': params}, *inputs)[0][:, :queries]

    found = loss_and_gradients(filled_up, params, x, context)
    assert asked == ([(2, expected, 2, 8)] if kernel == 'cudnn' and expected else [])
    assert_all_close(found, by_itself)


@pytest.mark.parametrize('tokens', [5, 64, 191])
def test_cudnn_does_not_get_what_it_fails_with(tokens, asked):
    """Where nothing was filled up, as when weights of every layer are asked for."""
    x = random_images(2, tokens, 16)
    module = layer('cudnn')
    module.apply(module.init(jax.random.key(0), x, x), x, x)
    assert not asked


@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        dict(pool='map'),
        dict(pool='gap', num_registers=1),
    ],
    ids=str,
)
def test_a_model_asks_for_its_kernel(fields, asked):
    """In every layer, but for the one query of the last layer or of the pooling."""
    images = random_images(2, 8, 12, 3)
    tokens = 6 if fields.get('pool') and 'num_registers' not in fields else 8  # or of 7
    build = functools.partial(models.build, SMALL, 5, dtype='bfloat16', unroll=1, **fields)
    params = {'params': randomised(build(), images)}
    expected = apply(build(), params, images, train=True)
    assert not asked
    found = apply(build(attention_kernel='cudnn'), params, images, train=True)
    assert set(asked) == {(2, tokens, 4, 8)}
    np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


# With 8 pixels an even number of patches, with 20 an odd one: to most of these a token is added.
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
def test_what_is_chosen_for_a_gpu_changes_nothing(fields, width, asked):
    """Outputs and gradients are those of XLA, in training and without."""
    images = random_images(2, 12, width, 3)
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, images)

    def by(kernel, *modes):  # in float32, which build does not allow for cuDNN itself
        linear = 'gpu' if kernel == 'cudnn' else kernel
        found = model.clone(
            fields=dataclasses.replace(model.fields, attention_kernel=kernel, linear_kernel=linear)
        )
        return loss_and_gradients(
            lambda params: jnp.stack(
                [found.apply({'params': params}, images, train=train) for train in modes]
            ),
            params,
        )

    # XLA computes the same in both, as nothing is dropped: once, and counted twice.
    expected, found = jax.tree.map(lambda x: 2 * x, by('xla', False)), by('cudnn', True, False)
    assert asked
    assert all(tokens % 2 == 0 for _, tokens, *_ in asked)
    assert_all_close(found, expected, rounding=1e-7)


@pytest.mark.slow
def test_dropout_where_tokens_are_filled_up(asked):
    """Its numbers depend on theirs; what nothing was filled up for is as by XLA."""

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
    filled, plain = by('cudnn', 20), by('xla', 20)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(filled))
    assert abs(filled[0] - plain[0]) < 0.5 * plain[0]


def test_cudnn_is_not_there_without_a_gpu():
    """JAX says so before it is lowered for any platform: tests cannot look at that program."""
    x = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(RuntimeError, match='cuDNN is not detected'):
        jax.nn.dot_product_attention(x, x, x, implementation='cudnn')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (dict(dtype='float32'), 'model.dtype float32 .expected bfloat16.'),
        (dict(hidden_size=1024), 'heads of size 256 .expected 8, 16, ... or 128.'),
        (dict(num_heads=8), 'heads of size 4'),
        (dict(attention='axial', pool='gap'), 'model.attention axial .expected full.'),
        (dict(position='relative', position_at='every_layer'), 'model.position relative'),
        (dict(attention_dropout_rate=0.1), 'model.attention_dropout_rate .expected 0.'),
    ],
    ids=str,
)
def test_what_a_kernel_does_not_compute(fields, message):
    given = SMALL | dict(dtype='bfloat16') | fields
    models.build(given | dict(attention_kernel='xla'), 5)
    models.build(SMALL | dict(dtype='bfloat16', attention_kernel='cudnn'), 5)
    with pytest.raises(UserError, match=f'attention_kernel is cudnn, .* compute {message}'):
        models.build(given | dict(attention_kernel='cudnn'), 5)


def test_unknown_kernel():
    with pytest.raises(
        UserError, match="attention_kernel is 'flash'. .*one of: auto, xla, cpu, cudnn"
    ):
        models.build(SMALL, 5, attention_kernel='flash')
