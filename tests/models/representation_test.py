import functools

import jax
import numpy as np
import pytest

from tests.support.parameters import randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import cost, representation


def of(model, params, images, names):
    """{name: representation}, compiled as a whole."""
    return jax.jit(
        lambda params, images: {
            name: representation.of(model, params, images, name) for name in names
        }
    )(params, images)


@pytest.mark.parametrize(
    'fields',
    [
        dict(representation_size=20),
        pytest.param(dict(attention='axial', pool='gap'), marks=pytest.mark.nightly),
        dict(num_registers=2, norm_after_pool=True, pool='gap'),
    ],
    ids=str,
)
def test_they_are_what_the_whole_model_computes_on_its_way(fields):
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, **fields)
    params = randomised(model, images)
    logits, outputs = jax.jit(functools.partial(model.apply, return_intermediates=True))(
        {'params': params}, images
    )
    pooled = outputs['representation']
    prefix = (model.pool == 'cls') + fields.get('num_registers', 0)
    tokens = np.asarray(outputs['encoded'])[:, prefix:]
    before = (
        np.tanh(pooled @ params['pre_logits']['kernel'] + params['pre_logits']['bias'])
        if (model.representation_size)
        else pooled
    )
    np.testing.assert_allclose(
        before @ params['head']['kernel'] + params['head']['bias'], logits, atol=1e-4
    )
    expected = {
        'pre_logits': before,
        'representation': pooled,
        'logits': logits,
        'patch_mean': tokens.mean(axis=1),
    }
    assert set(expected) == set(representation.NAMES)
    found = of(model, params, images, expected)
    for name, values in expected.items():
        representation.check(model, name)
        np.testing.assert_allclose(found[name], values, atol=1e-4)


def test_a_resnet_has_no_patches():
    resnet = dict(models.fields('r50x1')['resnet'], units=(1,), width=32)
    model = models.build({'resnet': resnet}, 4)
    images = random_images(1, 16, 16, 3)
    params = randomised(model, images)
    found = of(model, params, images, ['pre_logits', 'representation'])
    np.testing.assert_array_equal(found['pre_logits'], found['representation'])
    with pytest.raises(UserError, match='is patch_mean, and this model has no patches'):
        representation.check(model, 'patch_mean')


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
def test_what_is_sown_costs_nothing(fields):
    images = random_images(2, 8, 12, 3)
    model = models.build(fields, 4) if 'resnet' in fields else models.build(SMALL, 4, **fields)
    params = randomised(model, images)

    def sown(params):
        logits, variables = model.apply({'params': params}, images, mutable='intermediates')
        return logits, *variables['intermediates']['representation']

    logits, found = jax.jit(sown)(params)
    expected_logits, outputs = jax.jit(functools.partial(model.apply, return_intermediates=True))(
        {'params': params}, images
    )
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5)
    np.testing.assert_allclose(found, outputs['representation'], atol=1e-5)
    assert cost.count_flops(sown, params) == cost.count_flops(
        lambda params: model.apply({'params': params}, images), params
    )


def test_what_a_model_does_not_have():
    model = models.build(SMALL, 0)
    with pytest.raises(UserError, match='is logits, and this model has no head'):
        representation.check(model, 'logits')
    with pytest.raises(UserError, match="is 'pre_logit'. Did you mean pre_logits"):
        representation.check(model, 'pre_logit')
