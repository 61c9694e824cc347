"""The blocks: axial attention, dropout and stochastic depth."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import nightly_but
from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, assert_equals_reference, random_images
from vit_jax import models
from vit_jax.models import dropout


@pytest.mark.parametrize(
    ('kind', 'place'),
    nightly_but(
        [('learned_2d', 'shared'), ('relative', 'every_layer')],
        [
            ('learned_1d', 'stem'),
            ('learned_2d', 'shared'),
            ('sincos_2d', 'every_layer'),
            ('relative', 'every_layer'),
            ('none', 'stem'),
        ],
    ),
)
def test_axial_attention_equals_the_reference(kind, place):
    assert_equals_reference(dict(attention='axial', pool='gap', position=kind, position_at=place))


def test_axial_equals_full_attention_on_a_one_row_image():
    """Each column is one token, so attention along it mixes nothing."""
    images = random_images(2, 4, 24, 3)
    axial = models.build(SMALL, 7, attention='axial', pool='gap')
    params = randomised(axial, images)
    column = params['blocks']['column']
    for last in (column['attention']['out'], column['mlp']['dense2']):
        last.update(jax.tree.map(jnp.zeros_like, last))  # switches the blocks of columns off
    full = models.build(SMALL, 7, pool='gap')
    expected = apply(full, {'params': params | {'blocks': params['blocks']['row']}}, images)
    logits = apply(axial, {'params': params}, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


def random_draws(function, *args):
    """Returns the shapes of the random numbers of a function; the body of a loop counts once."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == 'random_bits':
                yield eqn.params['shape']
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return sorted(walk(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize(
    ('field', 'draws'),
    [
        # Two numbers share 32 bits. The first entries are the last layer, which has one token; then
        # embedding, attention, and the two layers of the MLP.
        ('dropout_rate', [(2, 1, 16)] * 2 + [(2, 1, 24)] + [(2, 5, 16)] * 3 + [(2, 5, 24)]),
        ('attention_dropout_rate', [(2, 4, 1, 3), (2, 4, 5, 3)]),
        ('stochastic_depth_rate', [(2,)] * 4),
    ],
)
def test_layers_with_random_numbers(field, draws, monkeypatch):
    monkeypatch.setattr(dropout, 'random_bits', jax.random.bits)  # a single operation
    images = random_images(2, 8, 8, 3)
    model = models.build(SMALL, 5, **{field: 0.5})
    params = {'params': randomised(model, images)}

    def training(key):
        return model.apply(params, images, train=True, rngs={'dropout': key})

    assert random_draws(training, jax.random.key(0)) == draws


def test_dropout_acts_in_training_only_and_follows_its_key():
    images = jax.random.uniform(jax.random.key(1), (2, 8, 8, 3))
    model = models.build(SMALL, 5, dropout_rate=0.5)
    params = {'params': randomised(model, images)}
    evaluated = apply(model, params, images)
    np.testing.assert_array_equal(evaluated, apply(models.build(SMALL, 5), params, images))
    training = jax.jit(functools.partial(model.apply, train=True))
    a, b, c = (training(params, images, rngs={'dropout': jax.random.key(k)}) for k in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3
    assert np.abs(a - evaluated).max() > 1e-3


@pytest.mark.parametrize(
    'fields',
    nightly_but([dict()], [dict(), dict(attention='axial', pool='gap')]),
    ids=str,
)
def test_stochastic_depth_drops_whole_branches_linearly_in_depth(fields):
    """The rates are 0, r/2 and r. A layer without branches does not change its input."""
    rate = 0.6
    number = 2000
    model = models.build(SMALL, 5, stochastic_depth_rate=rate, **fields)
    image = random_images(1, 8, 8, 3)
    num_branches = 4 if fields else 2
    params = {'params': randomised(model, image)}
    _, outputs = jax.jit(functools.partial(model.apply, train=True, return_intermediates=True))(
        params, jnp.tile(image, (number, 1, 1, 1)), rngs={'dropout': jax.random.key(1)}
    )
    before = outputs['embedded'][None]
    layers = np.concatenate([before, outputs['tokens']])
    unchanged = (layers[1:] == layers[:-1]).all((2, 3)).mean(axis=1)
    expected_shares = [0, (rate / 2) ** num_branches, rate**num_branches]
    for share, expected in zip(unchanged, expected_shares, strict=True):
        assert abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / number)


def test_stochastic_depth_is_off_in_evaluation():
    images = random_images(2, 8, 8, 3)
    params = {'params': randomised(models.build(SMALL, 5), images)}
    np.testing.assert_array_equal(
        apply(models.build(SMALL, 5, stochastic_depth_rate=0.9), params, images),
        apply(models.build(SMALL, 5), params, images),
    )
