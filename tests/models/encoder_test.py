"""The blocks: axial attention, dropout, stochastic depth, and the fields that all share."""

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
from vit_jax.errors import UserError
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
def test_axial(kind, place):
    assert_equals_reference(dict(attention='axial', pool='gap', position=kind, position_at=place))


def test_axial_equals_full_attention_on_a_one_row_image():
    """There each column is one token: attention along it can only change what the MLP also can."""
    images = random_images(2, 4, 24, 3)
    axial = models.build(SMALL, 7, attention='axial', pool='gap')
    params = randomised(axial, images)
    column = params['blocks']['column']
    for last in (column['attention']['out'], column['mlp']['dense2']):
        last.update(jax.tree.map(jnp.zeros_like, last))  # columns then change nothing
    full = models.build(SMALL, 7, pool='gap')
    expected = apply(full, {'params': params | {'blocks': params['blocks']['row']}}, images)
    logits = apply(axial, {'params': params}, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


def random_draws(function, *args):
    """Shapes of all random numbers that a function draws, a loop's body counted once."""

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
        # Two numbers share one of 32 bits. First the last layer, of one token, then the others:
        # embedding, attention, and the two of the MLP.
        ('dropout_rate', [(2, 1, 16)] * 2 + [(2, 1, 24)] + [(2, 5, 16)] * 3 + [(2, 5, 24)]),
        ('attention_dropout_rate', [(2, 4, 1, 3), (2, 4, 5, 3)]),
        ('stochastic_depth_rate', [(2,)] * 4),
    ],
)
def test_what_chance_acts_on(field, draws, monkeypatch):
    monkeypatch.setattr(dropout, 'random_bits', jax.random.bits)  # the same, and one operation
    images = random_images(2, 8, 8, 3)
    model = models.build(SMALL, 5, **{field: 0.5})
    params = {'params': randomised(model, images)}
    assert (
        random_draws(
            lambda key: model.apply(params, images, train=True, rngs={'dropout': key}),
            jax.random.key(0),
        )
        == draws
    )


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
    """With rates 0, r/2, r; a layer all whose branches are dropped changes nothing."""
    rate, number = 0.6, 2000
    model = models.build(SMALL, 5, stochastic_depth_rate=rate, **fields)
    image = random_images(1, 8, 8, 3)
    branches = 4 if fields else 2
    params = {'params': randomised(model, image)}
    _, outputs = jax.jit(functools.partial(model.apply, train=True, return_intermediates=True))(
        params, jnp.tile(image, (number, 1, 1, 1)), rngs={'dropout': jax.random.key(1)}
    )
    before = outputs['embedded'][None]
    layers = np.concatenate([before, outputs['tokens']])
    unchanged = (layers[1:] == layers[:-1]).all((2, 3)).mean(axis=1)
    for found, expected in zip(unchanged, [0, (rate / 2) ** branches, rate**branches], strict=True):
        assert abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / number)


def test_stochastic_depth_is_off_in_evaluation():
    images = random_images(2, 8, 8, 3)
    params = {'params': randomised(models.build(SMALL, 5), images)}
    np.testing.assert_array_equal(
        apply(models.build(SMALL, 5, stochastic_depth_rate=0.9), params, images),
        apply(models.build(SMALL, 5), params, images),
    )


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (dict(num_heads=5), 'hidden_size 32 does not divide among 5 heads'),
        (dict(num_heads=0), 'model.num_heads is 0: expected a whole number, at least 1'),
        (dict(mlp_dim=True), 'model.mlp_dim is True'),
        (
            dict(dropout_rate=1.0),
            'model.dropout_rate is 1.0: expected a number, at least 0 and at most',
        ),
        (dict(attention_dropout_rate=-0.5), 'model.attention_dropout_rate is -0.5'),
        (dict(layer_scale_init=-1), 'model.layer_scale_init is -1: expected a number'),
        (dict(droput_rate=0.1), "model has no field 'droput_rate'. Did you mean dropout_rate"),
        (dict(gelu='exact'), "model.gelu is 'exact'. It is one of: tanh, erf"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(UserError, match=message):
        models.build(SMALL, 5, **fields)
