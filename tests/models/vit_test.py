"""The model equals the paper's equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small
from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, assert_equals_reference, random_images
from vit_jax import models


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
def test_vit_equals_the_reference(fields):
    assert_equals_reference(fields)


@pytest.mark.parametrize(
    ('patch', 'shape'), [((4, 6), (1, 8, 18, 3)), ((2, 4), (1, 8, 8, 1)), ((4, 2), (1, 12, 4, 5))]
)
def test_rectangular_images_and_patches_equal_the_reference(patch, shape):
    assert_equals_reference(dict(patch_size=patch), shape)


@pytest.mark.parametrize('pool', ['cls', 'map', 'gap'])
def test_every_logit_depends_on_every_pixel(pool):
    images = random_images(1, 8, 8, 3)
    model = models.build(SMALL, 2, pool=pool)
    params = {'params': randomised(model, images)}
    jacobian = jax.jit(jax.jacrev(lambda x: model.apply(params, x)[0]))(images)
    assert np.all(np.abs(jacobian) > 0)


def test_a_patch_embedding_depends_on_its_patch_alone():
    """The patches are in row-major order."""
    model = models.build(SMALL, 0, pool='none')
    images = random_images(1, 8, 12, 3)
    params = {'params': randomised(model, images)}
    embedded = jax.jit(functools.partial(model.apply, params, return_intermediates=True))
    before = embedded(images)[1]['embedded']
    after = embedded(images.at[0, 4:8, 8:12].add(1))[1]['embedded']
    changed = np.abs(after - before).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(changed, [False, False, False, False, False, True])


@pytest.mark.parametrize('fields', [dict(), dict(attention='axial', pool='gap')], ids=str)
def test_intermediates_have_their_shapes_and_lead_to_the_logits(fields):
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, **fields)
    params = {'params': randomised(model, images)}
    logits, outputs = jax.jit(functools.partial(model.apply, return_intermediates=True))(
        params, images
    )
    expected = jax.jit(model.apply)(params, images)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    if 'attention' in fields:
        tokens = 6
        shapes = {'row_attention': (3, 2, 2, 4, 3, 3), 'column_attention': (3, 2, 3, 4, 2, 2)}
    else:
        tokens = 7
        shapes = {'attention': (3, 2, 4, 7, 7)}
    assert outputs['tokens'].shape == (3, 2, tokens, 32)
    assert outputs['embedded'].shape == outputs['encoded'].shape == (2, tokens, 32)
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
def test_bfloat16_models_have_float32_parameters_and_logits(fields):
    images = random_images(2, 8, 8, 3)
    low = models.build(SMALL, 5, dtype='bfloat16', **fields)
    params = randomised(low, images)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
    logits, outputs = apply(low, {'params': params}, images, return_intermediates=True)
    exact = apply(models.build(SMALL, 5, **fields), {'params': params}, images)
    assert logits.dtype == jnp.float32
    assert outputs['tokens'].dtype == outputs['embedded'].dtype == jnp.bfloat16
    assert 1e-5 < np.abs(logits - exact).max() / np.abs(exact).max() < 0.03
    if fields.get('pool') == 'gap':  # the mean is float32
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


def test_head_starts_at_zero_with_the_initial_bias_of_the_config():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 5, head_bias_init=-10.0)
    params = jax.jit(model.init)(jax.random.key(0), images)
    np.testing.assert_array_equal(apply(model, params, images), np.full((1, 5), -10.0))


def test_a_model_without_classes_returns_the_representation():
    images = jnp.ones((1, 8, 8, 3))
    model = models.build(SMALL, 0)
    out, params = jax.jit(model.init_with_output)(jax.random.key(0), images)
    assert out.shape == (1, 32)
    assert 'head' not in params['params']


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
    """Logits are float32 as well. Reading 64-bit checkpoints would need 64-bit JAX."""
    model = models.build(fields, 5)
    with jax.enable_x64(True):
        logits, params = jax.eval_shape(
            model.init_with_output, jax.random.key(0), jnp.ones((1, 32, 32, 3), jnp.float32)
        )
    for path, x in jax.tree.leaves_with_path((logits, params)):
        assert x.dtype == jnp.float32, jax.tree_util.keystr(path)
