"""The model equals the paper's equations, and its parts do what they are for."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import reference
from tests.support.parameters import randomised
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import cost, position, vit
from vit_jax.models.encoder import StochasticDepth
from vit_jax.models.position import PLACES

SMALL = dict(patch_size=(4, 4), hidden_size=32, num_layers=3, mlp_dim=48, num_heads=4)
DEFAULTS = models.fields('b16')


def random_images(*shape, seed=1):
    return jax.random.uniform(jax.random.key(seed), shape, minval=-1)


def assert_equals_reference(fields, shape=(2, 8, 12, 3)):
    """Logits and attention weights of `SMALL` with `fields` are those of the NumPy model."""
    model = models.build(SMALL, 7, **fields)
    images = random_images(*shape)
    params = randomised(model, images)
    logits, outputs = model.apply({'params': params}, images, return_intermediates=True)
    for n, image in enumerate(images):
        expected, weights = reference.vit(params, image, {**DEFAULTS, **SMALL, **fields})
        assert np.abs(logits[n] - expected).max() <= 1e-5 * np.abs(expected).max()
        if 'attention' in outputs:
            np.testing.assert_allclose(outputs['attention'][:, n], weights, atol=1e-5)


@pytest.mark.parametrize('fields', [
    dict(), dict(gelu='erf'), dict(representation_size=20), dict(layer_scale_init=0.1),
    dict(pool='gap'), dict(pool='map'), dict(pool='none'),
    dict(layer_norm_epsilon=0.01, pool='map')], ids=str)
def test_equals_the_paper_in_numpy(fields):
    assert_equals_reference(fields)


@pytest.mark.parametrize(('patch', 'shape'), [
    ((4, 6), (1, 8, 18, 3)), ((2, 4), (1, 8, 8, 1)), ((4, 2), (1, 12, 4, 5))])
def test_rectangular_images_and_patches_of_any_channels(patch, shape):
    assert_equals_reference(dict(patch_size=patch), shape)


POSITIONS = [(kind, place) for kind, places in PLACES.items() for place in places]


@pytest.mark.parametrize(('kind', 'place'), POSITIONS)
@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_every_cell_of_table_8(kind, place, pool):
    """With fixed sines and cosines beside the table's nine."""
    assert_equals_reference(dict(position=kind, position_at=place, pool=pool))


@pytest.mark.parametrize(('kind', 'place'), [
    ('learned_1d', 'stem'), ('learned_2d', 'shared'), ('sincos_2d', 'every_layer'),
    ('relative', 'every_layer'), ('none', 'stem')])
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
    expected = full.apply({'params': params | {'blocks': params['blocks']['row']}}, images)
    logits = axial.apply({'params': params}, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize('attention', ['full', 'axial'])
def test_permuting_patches_permutes_tokens_without_position(attention):
    """Axial attention sees rows and columns, so there whole rows are permuted."""
    images = random_images(1, 12, 8, 3)
    rows = images.reshape(3, 4, 8, 3)
    model = models.build(SMALL, 5, position='none', pool='none', attention=attention)
    params = {'params': randomised(model, images)}
    tokens = model.apply(params, images).reshape(3, 2, 5)
    order = np.array([2, 0, 1])
    permuted = model.apply(params, rows[order].reshape(images.shape)).reshape(3, 2, 5)
    np.testing.assert_allclose(permuted, tokens[order], atol=1e-5 * np.abs(tokens).max())
    assert np.abs(permuted - tokens).max() > 1e-3 * np.abs(tokens).max()


@pytest.mark.parametrize('pool', ['cls', 'map', 'gap'])
def test_every_logit_depends_on_every_pixel(pool):
    images = random_images(1, 8, 8, 3)
    model = models.build(SMALL, 2, pool=pool)
    params = {'params': randomised(model, images)}
    jacobian = jax.jit(jax.jacrev(lambda x: model.apply(params, x)[0]))(images)
    assert np.all(np.abs(jacobian) > 0)


def test_a_token_of_no_pool_starts_from_its_patch():
    """Row-major order: a changed patch changes its own token, and at the embedding only it."""
    model = models.build(SMALL, 0, pool='none')
    images = random_images(1, 8, 12, 3)
    params = {'params': randomised(model, images)}
    embedded = functools.partial(model.apply, params, return_intermediates=True)
    before = embedded(images)[1]['embedded']
    after = embedded(images.at[0, 4:8, 8:12].add(1))[1]['embedded']
    changed = np.abs(after - before).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(changed, [False, False, False, False, False, True])


FAMILIES = {
    'vit': dict(position='relative', position_at='shared', layer_scale_init=0.1),
    'axial': dict(attention='axial', pool='gap', position_at='every_layer'),
}


@functools.cache
def loss_and_gradients(family, **way):
    """Parameters, and the logits and gradients of a training step in which all chance acts."""
    images = random_images(2, 8, 8, 3)
    model = models.build(SMALL, 5, **FAMILIES[family], **way, num_layers=2, dropout_rate=0.2,
                         stochastic_depth_rate=0.3)
    params = randomised(model, images)

    def loss(params):
        logits = model.apply({'params': params}, images, train=True,
                             rngs={'dropout': jax.random.key(3)})
        return (logits**2).mean(), logits
    gradient = jax.grad(loss, has_aux=True)
    return params, *jax.jit(gradient)(params), cost.count_flops(gradient, params)


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('way', [
    dict(unroll=2, remat_policy='nothing_saveable'),
    dict(remat_policy='dots_with_no_batch_dims_saveable'), dict(unroll=2)], ids=str)
def test_loops_and_rematerialisation_change_nothing(family, way):
    """Equal parameters, outputs and gradients."""
    params, expected_gradients, expected, flops = loss_and_gradients(family)
    other_params, gradients, logits, other_flops = loss_and_gradients(family, **way)
    assert (other_flops > flops) == ('remat_policy' in way)
    jax.tree.map(np.testing.assert_array_equal, other_params, params)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected_gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest),
                 gradients, expected_gradients)


@pytest.mark.parametrize('fields', [dict(), dict(attention='axial', pool='gap')], ids=str)
def test_intermediates(fields):
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, **fields)
    params = {'params': randomised(model, images)}
    logits, outputs = jax.jit(functools.partial(model.apply, return_intermediates=True))(
        params, images)
    expected = jax.jit(model.apply)(params, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    tokens = 6 + ('attention' not in fields)
    assert outputs['tokens'].shape == (3, 2, tokens, 32)
    assert outputs['embedded'].shape == outputs['encoded'].shape == (2, tokens, 32)
    shapes = ({'attention': (3, 2, 4, 7, 7)} if 'attention' not in fields else
              {'row_attention': (3, 2, 2, 4, 3, 3), 'column_attention': (3, 2, 3, 4, 2, 2)})
    for name, shape in shapes.items():
        assert outputs[name].shape == shape
        np.testing.assert_allclose(outputs[name].sum(-1), 1, atol=1e-5)
    head = params['params']['head']
    np.testing.assert_allclose(outputs['representation'] @ head['kernel'] + head['bias'], logits,
                               rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('fields', [
    dict(position='relative', position_at='every_layer', layer_scale_init=0.1), dict(pool='map'),
    dict(attention='axial', pool='gap')], ids=str)
def test_bfloat16_computes_low_and_keeps_float32_parameters_and_logits(fields):
    images = random_images(2, 8, 8, 3)
    low = models.build(SMALL, 5, dtype='bfloat16', **fields)
    params = randomised(low, images)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
    logits, outputs = low.apply({'params': params}, images, return_intermediates=True)
    exact = models.build(SMALL, 5, **fields).apply({'params': params}, images)
    assert logits.dtype == jnp.float32
    assert outputs['tokens'].dtype == outputs['embedded'].dtype == jnp.bfloat16
    assert 1e-5 < np.abs(logits - exact).max() / np.abs(exact).max() < 0.03
    if fields.get('pool') == 'gap':  # the mean is summed and kept in float32
        mean = np.asarray(outputs['encoded'], np.float64).mean(axis=1)
        np.testing.assert_allclose(outputs['representation'], mean, atol=1e-6)


def test_relative_logits_of_bfloat16_are_summed_in_float32():
    query, table = (random_images(*shape).astype(jnp.bfloat16)
                    for shape in [(2, 9, 2, 16), (17, 2, 16)])
    exact = position.relative_logits(query.astype(jnp.float32), table.astype(jnp.float32))
    found = position.relative_logits(query, table)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_relative_logits_are_translation_invariant():
    """Moved along the sequence, the same contents give each other the same logits."""
    tokens, window = 11, 5
    contents = random_images(1, window, 2, 8)
    table = random_images(2 * tokens - 1, 2, 8, seed=2)

    def within_window(start):
        query = random_images(1, tokens, 2, 8, seed=3 + start)
        query = query.at[:, start:start + window].set(contents)
        logits = position.relative_logits(query, table)
        return logits[:, :, start:start + window, start:start + window]

    expected = within_window(0)
    for start in range(1, tokens - window + 1):
        np.testing.assert_allclose(within_window(start), expected, atol=1e-5)


def random_draws(function, *args):
    """Shapes of all random numbers that a function draws, a loop's body counted once."""
    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == 'random_bits':
                yield eqn.params['shape']
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from walk(inner)
    return sorted(walk(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize(('field', 'draws'), [
    ('dropout_rate', [(2, 5, 32)] * 3 + [(2, 5, 48)]),  # embedding, attention, mlp's two
    ('attention_dropout_rate', [(2, 4, 5, 5)]), ('stochastic_depth_rate', [(2,)] * 2)])
def test_what_chance_acts_on(field, draws):
    images = random_images(2, 8, 8, 3)
    model = models.build(SMALL, 5, **{field: 0.5})
    params = {'params': randomised(model, images)}
    assert random_draws(lambda key: model.apply(params, images, train=True, rngs={'dropout': key}),
                        jax.random.key(0)) == draws


def test_initial_values():
    model = models.build(SMALL, 5, hidden_size=256, layer_scale_init=0.1, head_bias_init=-10.0)
    params = model.init(jax.random.key(0), random_images(1, 16, 16, 3))['params']
    for name in ('scale1', 'scale2'):
        np.testing.assert_array_equal(params['blocks'][name], np.float32(0.1))
    np.testing.assert_array_equal(params['head']['kernel'], 0)
    np.testing.assert_array_equal(params['head']['bias'], -10)
    np.testing.assert_array_equal(params['cls'], 0)
    assert np.std(params['position']['embedding']) == pytest.approx(0.02, rel=0.1)


def test_dropout_acts_in_training_only_and_follows_its_key():
    images = jax.random.uniform(jax.random.key(1), (2, 8, 8, 3))
    model = models.build(SMALL, 5, dropout_rate=0.5)
    params = {'params': randomised(model, images)}
    evaluated = model.apply(params, images)
    np.testing.assert_array_equal(evaluated, models.build(SMALL, 5).apply(params, images))
    a, b, c = (model.apply(params, images, train=True, rngs={'dropout': jax.random.key(k)})
               for k in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3
    assert np.abs(a - evaluated).max() > 1e-3


def test_head_starts_at_zero_with_the_bias_asked_for():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 5, head_bias_init=-10.0)
    params = model.init(jax.random.key(0), images)
    np.testing.assert_array_equal(model.apply(params, images), np.full((1, 5), -10.0))


def test_no_classes_returns_the_representation():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 0)
    out, params = model.init_with_output(jax.random.key(0), images)
    assert out.shape == (1, 32)
    assert 'head' not in params['params']


def test_attention_dropout_acts_on_the_weights():
    """A rate too small to drop anything gives the fused path; a larger one acts in training."""
    images = random_images(2, 8, 8, 3)
    fields = dict(position='relative', position_at='every_layer')
    params = {'params': randomised(models.build(SMALL, 5, **fields), images)}

    def logits(rate, train):
        model = models.build(SMALL, 5, attention_dropout_rate=rate, **fields)
        return model.apply(params, images, train=train, rngs={'dropout': jax.random.key(1)})

    expected = logits(0.0, False)
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits(1e-9, True), expected, atol=tolerance)
    np.testing.assert_array_equal(logits(0.5, False), expected)
    assert np.abs(logits(0.5, True) - expected).max() > 100 * tolerance


@pytest.mark.parametrize('fields', [dict(), dict(attention='axial', pool='gap')], ids=str)
def test_stochastic_depth_drops_whole_branches_linearly_in_depth(fields):
    """With rates 0, r/2, r; a layer all whose branches are dropped changes nothing."""
    rate, number = 0.6, 2000
    model = models.build(SMALL, 5, stochastic_depth_rate=rate, **fields)
    image = random_images(1, 8, 8, 3)
    branches = 4 if fields else 2
    params = {'params': randomised(model, image)}
    _, outputs = jax.jit(functools.partial(model.apply, train=True, return_intermediates=True))(
        params, jnp.tile(image, (number, 1, 1, 1)), rngs={'dropout': jax.random.key(1)})
    before = outputs['embedded'][None]
    layers = np.concatenate([before, outputs['tokens']])
    unchanged = (layers[1:] == layers[:-1]).all((2, 3)).mean(axis=1)
    for found, expected in zip(unchanged, [0, (rate / 2) ** branches, rate**branches],
                               strict=True):
        assert abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / number)


def test_stochastic_depth_is_off_in_evaluation():
    images = random_images(2, 8, 8, 3)
    params = {'params': randomised(models.build(SMALL, 5), images)}
    np.testing.assert_array_equal(
        models.build(SMALL, 5, stochastic_depth_rate=0.9).apply(params, images),
        models.build(SMALL, 5).apply(params, images))


@pytest.mark.parametrize('parts', [1, 3])
def test_stochastic_depth_keeps_the_expectation(parts):
    y = jnp.asarray(np.random.default_rng(0).normal(size=(2000 * parts, 2, 4)), jnp.float32)
    dropped = StochasticDepth().apply({}, y, jnp.float32(0.3), 2000,
                                      rngs={'dropout': jax.random.key(0)})
    factor = np.asarray((dropped / y).reshape(2000, -1))
    np.testing.assert_allclose(factor, np.broadcast_to(factor[:, :1], factor.shape), rtol=1e-5)
    assert set(np.unique(np.round(factor, 4))) == {0, np.float32(np.round(1 / 0.7, 4))}
    assert abs(factor[:, 0].mean() - 1) <= 4 * np.sqrt(0.3 / 0.7 / 2000)


@pytest.mark.parametrize(('fields', 'message'), [
    (dict(pool='avg'), "model.pool is 'avg'. It is one of: cls, gap, map, none"),
    (dict(position='relativ'), "model.position is 'relativ'. Did you mean relative"),
    (dict(position_at='every-layer'), 'Did you mean every_layer'),
    (dict(position='relative'), 'relative cannot act at model.position_at stem: with it '
                                'model.position_at is every_layer or shared'),
    (dict(position='none', position_at='shared'), 'with it model.position_at is stem'),
    (dict(attention='axial'), 'model.pool is cls, but a class token has no row or column'),
    (dict(attention='axial', pool='gap', position='relative', position_at='shared'),
     'cannot be shared in axial attention'),
    (dict(hidden_size=30, num_heads=3, position='sincos_2d'), '30 is not divisible by 4'),
    (dict(num_heads=5), 'hidden_size 32 does not divide among 5 heads'),
    (dict(dropout_rate=1.0), 'model.dropout_rate is 1.0: expected at least 0 and below 1'),
    (dict(stochastic_depth_rate=-0.1), 'model.stochastic_depth_rate is -0.1'),
    (dict(unroll=0), 'model.unroll is 0: expected a whole number, at least 1'),
    (dict(num_heads=0), 'model.num_heads is 0'),
    (dict(num_layers=2.5), 'model.num_layers is 2.5: expected a whole number'),
    (dict(layer_scale_init=-1), 'model.layer_scale_init is -1: expected at least 0'),
    (dict(patch_size=0), r'model.patch_size 0: expected one positive integer'),
    (dict(droput_rate=0.1), "model has no field 'droput_rate'. Did you mean dropout_rate"),
    (dict(remat_policy='full'), "model.remat_policy is 'full'. It is one of: none, nothing_savea"),
    (dict(gelu='exact'), "model.gelu is 'exact'. It is one of: tanh, erf"),
    (dict(dtype='float16'), 'It is one of: float32, bfloat16')], ids=str)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(UserError, match=message):
        models.build(SMALL, 5, **fields)


@pytest.mark.parametrize(('size', 'pair'), [(224, (224, 224)), ((8,), (8, 8)), ([6, 4], (6, 4))])
def test_as_pair(size, pair):
    assert vit.as_pair(size) == pair


@pytest.mark.parametrize('size', [0, (1, 2, 3), (2.5, 1), ()])
def test_as_pair_refuses(size):
    with pytest.raises(UserError, match='expected one positive integer'):
        vit.as_pair(size)


def test_image_not_divisible_by_patch():
    with pytest.raises(UserError, match=r'image_size 384x384 is not divisible by patch_size 14x14. '
                                        r'The nearest image sizes are 378x378 and 392x392'):
        jax.eval_shape(models.build('ti14', 10).init, jax.random.key(0), jnp.ones((1, 384, 384, 3)))


def test_image_of_another_size_than_trained():
    model = models.build(SMALL, 5)
    params = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
    message = r'made with shape \(1, 5, 32\) and these 3x3 patches need \(1, 10, 32\)'
    with pytest.raises(UserError, match=message):
        model.apply(params, jnp.ones((1, 12, 12, 3)))
