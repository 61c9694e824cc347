"""AxialResNet equals an independent implementation; resnet_test.py has tests of all ResNets."""

import functools

import jax
import numpy as np
import pytest

from tests.support import axial_reference
from tests.support.errors import refused
from tests.support.parameters import apply, randomised
from vit_jax import models
from vit_jax.models import axial_resnet, cost, resnet, variants
from vit_jax.weights import adapt

SMALL = dict(
    models.fields('axial_r50'),
    axial_heads=2,
    resnet=dict(variants.axial_resnet((1, 2), width=8), num_groups=4),
)

CONV = functools.partial(
    resnet.StdConv, fixed_padding=True, epsilon=1e-10, epsilon_on='variance', dtype='float32'
)
NORM = functools.partial(resnet.nn.GroupNorm, num_groups=4, epsilon=1e-5)


def images(*shape):
    return jax.random.uniform(jax.random.key(1), shape, minval=-1)


# The feature map of 12x20 pixels has 3x5 points, which cannot be halved.
@pytest.mark.parametrize(
    'size', [(12, 20), pytest.param((16, 24), marks=pytest.mark.slow)], ids=str
)
def test_logits_equal_the_reference(size):
    batch = images(2, *size, 3)
    model = models.build(SMALL, 5)
    params = randomised(model, batch)
    expected = np.stack([axial_reference.axial_resnet(params, x, SMALL) for x in batch])
    logits = apply(model, {'params': params}, batch)
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(('heads', 'length'), [(1, 3), (4, 1)])
def test_attention_along_lines_equals_the_reference(heads, length):
    x = images(2, 3, length, 16)
    layer = axial_resnet.AxialAttention(heads, CONV, NORM, 1e-5, 'float32')
    params = randomised(layer, x)
    exact_params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    expected = [
        axial_reference.attend(np.asarray(image, np.float64), exact_params, heads, 4) for image in x
    ]
    np.testing.assert_allclose(apply(layer, {'params': params}, x), expected, atol=2e-5)


def test_units_start_as_the_identity():
    unit = resnet.ResidualUnit(
        4,
        1,
        CONV,
        NORM,
        preactivation=False,
        axial=functools.partial(axial_resnet.AxialAttention, 2, CONV, NORM, 1e-5, 'float32'),
    )
    x = np.abs(images(2, 6, 4, 16))
    (y, _), variables = jax.jit(unit.init_with_output)(jax.random.key(0), x)
    np.testing.assert_array_equal(y, x)
    assert variables['params'].keys() == {'conv1', 'norm1', 'column', 'row', 'conv3', 'norm3'}


@pytest.mark.slow
def test_multiplications_equal_the_source():
    """Table 1 of arXiv 2003.07853: 2.8 billion for the conv-stem model at 224 px."""
    flops = cost.of_model(models.build('axial_r50', 1000), (224, 224)).flops
    assert round(flops / 2e9, 1) == 2.8


def test_weights_fit_images_of_another_size():
    """Only the embeddings of offsets are interpolated, as in an axial ViT."""
    model = models.build(SMALL, 5)
    params = randomised(model, images(1, 16, 24, 3))
    target = jax.eval_shape(model.init, jax.random.key(0), images(1, 32, 24, 3))['params']
    fitted, changes = adapt.adapt(params, target, grid=(4, 3), source_grid=None)
    resized = {c.name for c in changes if c.action == 'resized'}
    assert resized == {
        f'resnet/stage{s}/{unit}/column/position/relative'
        for s, unit in ((1, 'first'), (2, 'first'), (2, 'rest'))
    }
    logits = jax.eval_shape(
        model.apply, {'params': fitted | {'head': params['head']}}, images(1, 32, 24, 3)
    )
    assert logits.shape == (1, 5)
    with refused(kind='value', field='images') as error:
        jax.eval_shape(model.apply, {'params': params}, images(1, 32, 24, 3))
    assert '(relative, relative) was made with shape (7, 1, 16)' in str(error.value)


@pytest.mark.parametrize(
    ('change', 'field', 'value'),
    [
        (dict(axial_heads=3), 'model.resnet.width', 8),
        (dict(axial_heads=-1), 'model.axial_heads', -1),
        (
            dict(resnet=SMALL['resnet'] | dict(preactivation=True)),
            'model.resnet.preactivation',
            True,
        ),
    ],
)
def test_impossible_fields_are_refused(change, field, value):
    with refused(kind='value', field=field, value=value):
        models.build(SMALL | change, 5)
