"""The model equals the paper's equations, and its parts do what they are for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small
from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, assert_equals_reference, random_images
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import cost, vit


@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        dict(block='parallel'),
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                dict(num_layers=1),
                dict(num_registers=2, stem_norm=True),
                dict(unroll=3, remat_policy='nothing_saveable'),
                dict(layer_scale_init=0.1, position='sincos_2d', position_at='every_layer'),
            )
        ),
    ],
    ids=str,
)
def test_of_the_last_layer_only_the_class_token_is_computed(fields):
    """Values and gradients are those of all tokens, which intermediates need, for less work."""
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, images)

    def loss(params, whole):
        logits = model.apply({'params': params}, images, train=True, return_intermediates=whole)
        return ((logits[0] if whole else logits) ** 2).sum()

    gradient = jax.value_and_grad(loss)
    assert cost.count_flops(functools.partial(gradient, whole=False), params) < cost.count_flops(
        functools.partial(gradient, whole=True), params
    )
    (value, found), (expected, whole) = (
        jax.jit(functools.partial(gradient, whole=whole))(params) for whole in (False, True)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    largest = max(np.abs(y).max() for y in jax.tree.leaves(whole))
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * largest, err_msg=str(path))


@pytest.mark.parametrize(
    'fields',
    [
        dict(),
        dict(gelu='erf'),
        dict(representation_size=20),
        dict(layer_scale_init=0.1),
        dict(pool='gap'),
        dict(pool='map'),
        dict(pool='none'),
        dict(layer_norm_epsilon=0.01, pool='map'),
        dict(gelu='quick', num_registers=3),
        dict(num_registers=2, pool='none', position='learned_2d', position_at='every_layer'),
        dict(num_registers=2, position='relative', position_at='shared'),
        dict(num_registers=2, pool='map', norm_after_pool=True, position='sincos_2d'),
        dict(stem_norm=True, num_registers=1, pool='gap', position_at='shared'),
        dict(stem_norm=True, norm_after_pool=True),
        dict(block='parallel', layer_scale_init=0.1, position='relative', position_at='shared'),
        dict(block='parallel', pool='gap'),
    ],
    ids=str,
)
def test_equals_the_paper_in_numpy(fields):
    assert_equals_reference(fields)


@pytest.mark.parametrize(
    ('patch', 'shape'), [((4, 6), (1, 8, 18, 3)), ((2, 4), (1, 8, 8, 1)), ((4, 2), (1, 12, 4, 5))]
)
def test_rectangular_images_and_patches_of_any_channels(patch, shape):
    assert_equals_reference(dict(patch_size=patch), shape)


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
    embedded = jax.jit(functools.partial(model.apply, params, return_intermediates=True))
    before = embedded(images)[1]['embedded']
    after = embedded(images.at[0, 4:8, 8:12].add(1))[1]['embedded']
    changed = np.abs(after - before).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(changed, [False, False, False, False, False, True])


@pytest.mark.parametrize('fields', [dict(), dict(attention='axial', pool='gap')], ids=str)
def test_intermediates(fields):
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, **fields)
    params = {'params': randomised(model, images)}
    logits, outputs = jax.jit(functools.partial(model.apply, return_intermediates=True))(
        params, images
    )
    expected = jax.jit(model.apply)(params, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    tokens = 6 + ('attention' not in fields)
    assert outputs['tokens'].shape == (3, 2, tokens, 32)
    assert outputs['embedded'].shape == outputs['encoded'].shape == (2, tokens, 32)
    shapes = (
        {'attention': (3, 2, 4, 7, 7)}
        if 'attention' not in fields
        else {'row_attention': (3, 2, 2, 4, 3, 3), 'column_attention': (3, 2, 3, 4, 2, 2)}
    )
    for name, shape in shapes.items():
        assert outputs[name].shape == shape
        np.testing.assert_allclose(outputs[name].sum(-1), 1, atol=1e-5)
    head = params['params']['head']
    np.testing.assert_allclose(
        outputs['representation'] @ head['kernel'] + head['bias'], logits, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(
    'fields',
    [
        dict(position='relative', position_at='every_layer', layer_scale_init=0.1),
        dict(pool='map'),
        dict(attention='axial', pool='gap'),
    ],
    ids=str,
)
def test_bfloat16_computes_low_and_keeps_float32_parameters_and_logits(fields):
    images = random_images(2, 8, 8, 3)
    low = models.build(SMALL, 5, dtype='bfloat16', **fields)
    params = randomised(low, images)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
    logits, outputs = apply(low, {'params': params}, images, return_intermediates=True)
    exact = apply(models.build(SMALL, 5, **fields), {'params': params}, images)
    assert logits.dtype == jnp.float32
    assert outputs['tokens'].dtype == outputs['embedded'].dtype == jnp.bfloat16
    assert 1e-5 < np.abs(logits - exact).max() / np.abs(exact).max() < 0.03
    if fields.get('pool') == 'gap':  # the mean is summed and kept in float32
        mean = np.asarray(outputs['encoded'], np.float64).mean(axis=1)
        np.testing.assert_allclose(outputs['representation'], mean, atol=1e-6)


def test_initial_values():
    model = models.build(SMALL, 5, hidden_size=256, layer_scale_init=0.1, head_bias_init=-10.0)
    params = jax.jit(model.init)(jax.random.key(0), random_images(1, 16, 16, 3))['params']
    for name in ('scale1', 'scale2'):
        np.testing.assert_array_equal(params['blocks'][name], np.float32(0.1))
    np.testing.assert_array_equal(params['head']['kernel'], 0)
    np.testing.assert_array_equal(params['head']['bias'], -10)
    np.testing.assert_array_equal(params['cls'], 0)
    assert np.std(params['position']['embedding']) == pytest.approx(0.02, rel=0.1)


def test_head_starts_at_zero_with_the_bias_asked_for():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 5, head_bias_init=-10.0)
    params = jax.jit(model.init)(jax.random.key(0), images)
    np.testing.assert_array_equal(apply(model, params, images), np.full((1, 5), -10.0))


def test_no_classes_returns_the_representation():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 0)
    out, params = jax.jit(model.init_with_output)(jax.random.key(0), images)
    assert out.shape == (1, 32)
    assert 'head' not in params['params']


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (dict(pool='avg'), "model.pool is 'avg'. It is one of: cls, gap, map, none"),
        (dict(attention='axial'), 'but a class token and registers have no row or column'),
        (
            dict(attention='axial', pool='gap', num_registers=2),
            'model.pool is gap and model.num_regis'
            'ters 2, .*: set model.pool to gap, map or none, and model.num_registers to 0',
        ),
        (dict(num_registers=-1), 'model.num_registers is -1: expected a whole number, at least 0'),
        (dict(stem_norm=1), 'model.stem_norm is 1: expected True or False'),
        (
            dict(attention='axial', pool='gap', position='relative', position_at='shared'),
            'cannot be shared in axial attention',
        ),
        (dict(stochastic_depth_rate=-0.1), 'model.stochastic_depth_rate is -0.1'),
        (dict(num_layers=2.5), 'model.num_layers is 2.5: expected a whole number'),
        (dict(representation_size=-1), 'model.representation_size is -1: expected a whole number'),
        (dict(patch_size=0), r'model.patch_size 0: expected one positive integer'),
        (dict(atention='axial'), "model has no field 'atention'. Did you mean attention"),
        (dict(fields=None), "model has no field 'fields'"),
        (dict(resnet={}), 'model.resnet lacks fixed_padding'),
    ],
    ids=str,
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(UserError, match=message):
        models.build(SMALL, 5, **fields)


@pytest.mark.parametrize(
    'fields',
    [
        *small.MODELS.values(),
        small.VIT | dict(position='relative', position_at='every_layer'),
        small.VIT | dict(position='learned_2d', position_at='shared'),
    ],
    ids=[*small.MODELS, 'relative', 'learned_2d'],
)
def test_parameters_are_float32_where_jax_has_64_bits(fields):
    """So are logits; else checkpoints could be read only where it has."""
    model = models.build(fields, 5)
    with jax.enable_x64(True):
        logits, params = jax.eval_shape(
            model.init_with_output, jax.random.key(0), jnp.ones((1, 32, 32, 3), jnp.float32)
        )
    for path, x in jax.tree.leaves_with_path((logits, params)):
        assert x.dtype == jnp.float32, jax.tree_util.keystr(path)


@pytest.mark.parametrize(('size', 'pair'), [(224, (224, 224)), ((8,), (8, 8)), ([6, 4], (6, 4))])
def test_as_pair(size, pair):
    assert vit.as_pair(size) == pair


@pytest.mark.parametrize('size', [0, (1, 2, 3), (2.5, 1), ()])
def test_as_pair_refuses(size):
    with pytest.raises(UserError, match='expected one positive integer'):
        vit.as_pair(size)


def test_image_not_divisible_by_patch():
    with pytest.raises(
        UserError,
        match=r'image_size 384x384 is not divisible by patch_size 14x14. '
        r'The nearest image sizes are 378x378 and 392x392',
    ):
        jax.eval_shape(models.build('ti14', 10).init, jax.random.key(0), jnp.ones((1, 384, 384, 3)))


@pytest.mark.parametrize(
    ('size', 'nearest'),
    [
        ((40, 32), 's are 32x32 and 48x32'),
        ((16, 15), ' is 16x16'),
        ((33, 15), 's are 32x16 and 48x16'),
        ((30, 20), 's are 16x16 and 32x32'),
    ],
)
def test_a_side_that_fits_stays(size, nearest):
    with pytest.raises(UserError, match=f'The nearest image size{nearest}'):
        models.build('ti16', 10).grid(size)


@pytest.mark.parametrize('partial_patches', ['refuse', 'drop'])
def test_image_smaller_than_a_patch(partial_patches):
    with pytest.raises(UserError, match=r'The nearest image size is 16x16\.$'):
        models.build('ti16', 10, partial_patches=partial_patches).grid((8, 8))


def test_what_is_left_of_an_image_can_be_dropped():
    model = models.build(SMALL, 5, partial_patches='drop')
    patch, _ = SMALL['patch_size']
    images = jax.random.normal(jax.random.key(1), (2, 3 * patch + 1, 3 * patch - 1, 3))
    params = jax.jit(model.init)(jax.random.key(0), images)
    assert model.grid(images.shape[1:3]) == (3, 2)
    cut = images[:, : 3 * patch, : 2 * patch]
    np.testing.assert_array_equal(
        jax.jit(model.apply)(params, images), jax.jit(models.build(SMALL, 5).apply)(params, cut)
    )
    with pytest.raises(UserError, match='is not divisible'):
        model.grid((patch - 1, patch))
