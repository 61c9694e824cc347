"""Properties of the ResNets; parity_test.py compares them with independent implementations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.parameters import apply, randomised
from vit_jax import models
from vit_jax.models import cost, resnet, variants

TRANSFORMER = dict(hidden_size=16, num_layers=1, mlp_dim=24, num_heads=2)
BIT = dict(resnet=dict(variants.bit_resnet((1, 3), width=8), num_groups=4))
HYBRID = dict(
    TRANSFORMER,
    patch_size=(1, 1),
    resnet=dict(variants.hybrid_resnet((3, 1), width=8), num_groups=4),
)
AXIAL = dict(axial_heads=2, resnet=dict(variants.axial_resnet((1, 2), width=8), num_groups=4))
both = pytest.mark.parametrize('fields', [BIT, HYBRID], ids=['bit', 'hybrid'])
each = pytest.mark.parametrize(
    'fields',
    [BIT, HYBRID, pytest.param(AXIAL, marks=pytest.mark.slow)],
    ids=['bit', 'hybrid', 'axial'],
)


def random_images(*shape):
    return jax.random.uniform(jax.random.key(1), shape, minval=-1)


@functools.cache
def logits_and_gradients(family, **way):
    images = random_images(2, 16, 24, 3)
    model = models.build({'bit': BIT, 'hybrid': HYBRID}[family], 5, **way)
    params = randomised(model, images)

    def loss(params):
        logits = model.apply({'params': params}, images, train=True)
        return (logits**2).mean(), logits

    gradient = jax.grad(loss, has_aux=True)
    return params, *jax.jit(gradient)(params), cost.count_flops(gradient, params)


@pytest.mark.slow
@pytest.mark.parametrize('family', [pytest.param('bit', marks=pytest.mark.nightly), 'hybrid'])
@pytest.mark.parametrize(
    'way',
    [
        dict(unroll=2, remat_policy='nothing_saveable'),
        pytest.param(dict(remat_policy='products'), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_loops_and_rematerialisation_change_nothing(family, way):
    params, expected_gradients, expected, flops = logits_and_gradients(family)
    other_params, gradients, logits, other_flops = logits_and_gradients(family, **way)
    # With 'products' the backward pass repeats only the products of attention.
    repeats_products = 'unroll' in way or family == 'hybrid'
    assert (other_flops > flops) == repeats_products
    jax.tree.map(np.testing.assert_array_equal, other_params, params)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected_gradients))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest),
        gradients,
        expected_gradients,
    )


def test_kernels_are_standardised_in_float32_with_a_bfloat16_computation():
    conv = resnet.StdConv(
        4, 3, 1, fixed_padding=True, epsilon=1e-5, epsilon_on='std', dtype='bfloat16'
    )
    # The mean is far from 0, so in bfloat16 the centred kernel would be inexact.
    kernel = np.asarray(1 + random_images(3, 3, 2, 4))
    centred = kernel - kernel.mean((0, 1, 2), dtype=np.float64)
    expected = centred / (centred.std((0, 1, 2)) + 1e-5)
    impulse = np.zeros((1, 5, 5, 2), np.float32)
    impulse[0, 2, 2, 1] = 1  # the output is the flipped kernel
    standardised = conv.apply({'params': {'kernel': kernel}}, impulse)[0, 1:4, 1:4][::-1, ::-1]
    assert standardised.dtype == jnp.bfloat16
    np.testing.assert_allclose(standardised.astype('float32'), expected[:, :, 1], rtol=2**-8)


@pytest.mark.parametrize(
    'fields', [HYBRID, pytest.param(BIT, marks=pytest.mark.nightly)], ids=['hybrid', 'bit']
)
def test_logits_do_not_depend_on_scale_and_mean_of_standardised_kernels(fields):
    images = random_images(1, 16, 16, 3)
    model = models.build(fields, 5)
    params = randomised(model, images)

    def change(path, kernel):
        if path[-1].key != 'kernel':
            return kernel
        return 3 * kernel + jnp.linspace(-1, 1, kernel.shape[-1])

    changed = params | {'resnet': jax.tree.map_with_path(change, params['resnet'])}
    expected = apply(model, {'params': params}, images)
    logits = apply(model, {'params': changed}, images)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_units_of_a_hybrid_start_as_the_identity():
    """The scale of their last GroupNorm is zero; the units of BiT have no norm there."""
    unit = resnet.ResidualUnit(
        4,
        1,
        functools.partial(
            resnet.StdConv, fixed_padding=False, epsilon=1e-5, epsilon_on='std', dtype='float32'
        ),
        functools.partial(resnet.nn.GroupNorm, num_groups=2),
        preactivation=False,
    )
    x = jnp.abs(random_images(2, 6, 6, 16))
    (y, _), variables = unit.init_with_output(jax.random.key(0), x)
    np.testing.assert_array_equal(y, x)
    assert 'conv_proj' not in variables['params']


@pytest.mark.parametrize(
    ('fields', 'grids'),
    [
        (BIT, [(5, 7), (5, 7), (3, 4)]),
        (AXIAL, [(5, 7), (5, 7), (3, 4)]),
        (HYBRID, [(5, 7), (5, 7), (3, 4)]),
    ],
    ids=['bit', 'axial', 'hybrid'],
)
def test_every_halving_rounds_up(fields, grids):
    model = models.build(fields, 5)
    assert model.grid((18, 26)) == grids[-1]
    (logits, outputs), _ = jax.eval_shape(
        functools.partial(model.init_with_output, return_intermediates=True),
        jax.random.key(0),
        random_images(2, 18, 26, 4),
    )
    assert logits.shape == (2, 5)
    if fields is not HYBRID:
        assert [x.shape[1:3] for x in outputs['stages']] == grids
        assert outputs['representation'].shape == (2, 64)
    else:
        assert outputs['embedded'].shape == (2, 12 + 1, 16)


@pytest.mark.slow
def test_intermediates_do_not_change_the_logits():
    images = random_images(2, 16, 16, 3)
    model = models.build(BIT, 5)
    params = randomised(model, images)
    logits, outputs = apply(model, {'params': params}, images, return_intermediates=True)
    np.testing.assert_allclose(logits, apply(model, {'params': params}, images), rtol=1e-5)
    np.testing.assert_array_equal(
        outputs['representation'], apply(models.build(BIT, 0), {'params': params}, images)
    )


@pytest.mark.parametrize(
    'fields',
    nightly_but([HYBRID], [BIT, HYBRID, AXIAL]),
    ids=['bit', 'hybrid', 'axial'],
)
def test_bfloat16_models_have_float32_parameters_and_logits(fields):
    images = random_images(1, 16, 16, 3)
    low = models.build(fields, 5, dtype='bfloat16')
    params = randomised(low, images)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
    exact = apply(models.build(fields, 5), {'params': params}, images)
    logits = apply(low, {'params': params}, images)
    assert logits.dtype == jnp.float32
    assert 1e-5 < np.abs(logits - exact).max() / np.abs(exact).max() < 0.05


def test_hybrids_with_preactivation_are_refused():
    with refused(kind='value', field='model.resnet.preactivation', value=True):
        models.build(HYBRID | dict(resnet=HYBRID['resnet'] | dict(preactivation=True)), 5)


@pytest.mark.parametrize(
    ('model', 'fields', 'expected'),
    [
        (
            'r50x1',
            dict(dropout_rate=0.1),
            dict(kind='unknown', field='model', value='dropout_rate'),
        ),
        (
            'r50x1',
            dict(hidden_size=64),
            dict(kind='unknown', field='model', value='hidden_size'),
        ),
        (
            'b16',
            dict(resnet=dict(units=(1,))),
            dict(kind='missing', field='model.resnet.fixed_padding'),
        ),
        ({}, {}, dict(kind='missing', field='model.hidden_size')),
    ],
)
def test_fields_of_another_family_are_refused(model, fields, expected):
    with refused(**expected):
        models.build(model, 5, **fields)


def test_head_starts_at_zero_with_the_initial_bias_of_the_config():
    params = jax.jit(models.build(BIT, 5, head_bias_init=-10.0).init)(
        jax.random.key(0), random_images(1, 16, 16, 3)
    )['params']
    np.testing.assert_array_equal(params['head']['kernel'], 0)
    np.testing.assert_array_equal(params['head']['bias'], -10)


def test_root_of_stride_four_under_patches_of_eight():
    """R+Ti/16 has 49 patches at 224 px."""
    model = models.build('r_ti16', 10)
    assert model.grid((224, 224)) == (7, 7)
    with refused(kind='value', field='image_size', value=(200, 224)) as error:
        model.grid((200, 224))
    assert str(error.value) == (
        'the size of the feature map (one point for 4 pixels) 50x56 is not divisible by patch_size '
        '8x8. The nearest image sizes are 192x224 and 224x224; model.partial_patches=drop ignores '
        'the rest of the image.'
    )


@pytest.mark.parametrize(
    ('change', 'kind', 'field', 'value'),
    [
        (dict(width=10), 'value', 'model.resnet.width', 10),
        (dict(weight_epsilon_on='sd'), 'choice', 'model.resnet.weight_epsilon_on', 'sd'),
        (dict(num_groups=0), 'value', 'model.resnet.num_groups', 0),
        (dict(units=(1, 0)), 'value', 'model.resnet.units', (1, 0)),
        (dict(units=3), 'value', 'model.resnet.units', 3),
        (dict(units=()), 'value', 'model.resnet.units', ()),
        (dict(unit=(1,)), 'unknown', 'model.resnet', 'unit'),
    ],
)
def test_impossible_fields_are_refused(change, kind, field, value):
    with refused(kind=kind, field=field, value=value):
        models.build(dict(resnet=BIT['resnet'] | change), 5)
