import functools

import jax
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.parameters import randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.models import cost, representation


def of(model, params, images, names):
    """Returns the representations by name."""

    @jax.jit
    def compute(params, images):
        return {name: representation.of(model, params, images, name) for name in names}

    return compute(params, images)


@pytest.mark.parametrize(
    'fields',
    [
        dict(representation_size=20),
        pytest.param(dict(attention='axial', pool='gap'), marks=pytest.mark.nightly),
        dict(num_registers=2, norm_after_pool=True, pool='gap'),
    ],
    ids=str,
)
def test_representations_equal_intermediates_of_the_model(fields):
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, images)
    logits, outputs = jax.jit(functools.partial(model.apply, return_intermediates=True))(
        {'params': params}, images
    )
    pooled = outputs['representation']
    prefix = fields.get('num_registers', 0)
    if model.pool == 'cls':
        prefix += 1
    patches = np.asarray(outputs['encoded'])[:, prefix:]
    pre_logits = pooled
    if model.representation_size:
        hidden_layer = params['pre_logits']
        pre_logits = np.tanh(pooled @ hidden_layer['kernel'] + hidden_layer['bias'])
    head = params['head']
    np.testing.assert_allclose(pre_logits @ head['kernel'] + head['bias'], logits, atol=1e-4)
    expected = {
        'pre_logits': pre_logits,
        'representation': pooled,
        'logits': logits,
        'patch_mean': patches.mean(axis=1),
    }
    assert set(expected) == set(representation.NAMES)
    representations = of(model, params, images, expected)
    for name, values in expected.items():
        representation.check(model, name)
        np.testing.assert_allclose(representations[name], values, atol=1e-4)


def test_patch_mean_of_a_resnet_is_refused():
    resnet = dict(models.fields('r50x1')['resnet'], units=(1,), width=32)
    model = models.build({'resnet': resnet}, 4)
    images = random_images(1, 16, 16, 3)
    params = randomised(model, images)
    representations = of(model, params, images, ['pre_logits', 'representation'])
    np.testing.assert_array_equal(representations['pre_logits'], representations['representation'])
    with refused(kind='value', field='the representation', value='patch_mean') as error:
        representation.check(model, 'patch_mean')
    assert str(error.value) == (
        'the representation is patch_mean, and this model has no patches. Use pre_logits.'
    )


@pytest.mark.parametrize(
    'fields',
    [
        dict(representation_size=20),
        pytest.param(dict(pool='gap'), marks=pytest.mark.nightly),
        pytest.param(dict(pool='none'), marks=pytest.mark.nightly),
        {'resnet': dict(models.fields('r50x1')['resnet'], units=(1,), width=32)},
    ],
    ids=str,
)
def test_the_sown_representation_costs_nothing(fields):
    images = random_images(2, 8, 12, 3)
    model = models.build(fields, 4) if 'resnet' in fields else models.build(SMALL, 4, **fields)
    params = randomised(model, images)

    def sown(params):
        logits, variables = model.apply({'params': params}, images, mutable='intermediates')
        return logits, *variables['intermediates']['representation']

    logits, sown_representation = jax.jit(sown)(params)
    expected_logits, outputs = jax.jit(functools.partial(model.apply, return_intermediates=True))(
        {'params': params}, images
    )
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5)
    np.testing.assert_allclose(sown_representation, outputs['representation'], atol=1e-5)
    assert cost.count_flops(sown, params) == cost.count_flops(
        lambda params: model.apply({'params': params}, images), params
    )


def test_missing_and_unknown_representations_are_refused():
    model = models.build(SMALL, 0)
    with refused(kind='value', field='the representation', value='logits'):
        representation.check(model, 'logits')
    with refused(kind='choice', field='the representation', value='pre_logit'):
        representation.check(model, 'pre_logit')
