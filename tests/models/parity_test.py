"""Our logits equal the logits of independent implementations with the same parameters.

All models are compared with timm, and the plain ViT with transformers. The tolerance is 1e-5 of the
largest logit, in float32. All parameters are random.
"""

import functools

import jax
import numpy as np
import pytest

from tests.support import interop
from tests.support.parameters import randomised
from vit_jax import models
from vit_jax.models import variants

SMALL = dict(patch_size=(4, 4), hidden_size=32, num_layers=3, mlp_dim=48, num_heads=4)
# Random networks amplify rounding errors; in networks of this size they are below 4e-6.
HYBRID = variants.hybrid_resnet((), width=16) | dict(num_groups=4)
BIT = variants.bit_resnet((), width=16) | dict(num_groups=4)

timm_vit = interop.timm_vit, interop.to_timm
timm_bit = interop.timm_bit, interop.to_timm
huggingface_vit = interop.huggingface_vit, interop.to_huggingface


def assert_equal(fields, peer, image_shape=(16, 16, 3), num_classes=7):
    """Asserts equal logits of a peer, given as (constructor, conversion of parameters)."""
    make, convert = peer
    if fields.get('norm_after_pool'):
        convert = functools.partial(convert, last_norm='fc_norm')
    theirs = make(fields, image_shape, num_classes)
    images = np.random.default_rng(1).normal(size=(2, *image_shape)).astype(np.float32)
    ours = models.build(fields, num_classes)
    params = randomised(ours, images)
    expected = interop.logits(interop.load(theirs, convert(params)), images)
    logits = jax.jit(ours.apply)({'params': params}, images)
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize('peer', [timm_vit, huggingface_vit], ids=['timm', 'transformers'])
@pytest.mark.parametrize(('gelu', 'epsilon'), [('tanh', 1e-6), ('erf', 1e-2)])
def test_vit_equals_peers(peer, gelu, epsilon):
    assert_equal(SMALL | dict(gelu=gelu, layer_norm_epsilon=epsilon), peer)


@pytest.mark.parametrize('peer', [timm_vit, huggingface_vit], ids=['timm', 'transformers'])
def test_rectangles_of_five_channels_equal_peers(peer):
    assert_equal(SMALL | dict(patch_size=(4, 2)), peer, image_shape=(12, 16, 5))


def test_hidden_layer_of_the_head_equals_a_peer():
    assert_equal(SMALL | dict(representation_size=20), huggingface_vit)


@pytest.mark.parametrize(
    'fields',
    [
        dict(pool='none', layer_scale_init=1e-4),
        dict(pool='map', gelu='erf', layer_norm_epsilon=1e-2),
        dict(gelu='quick', num_registers=4),
        dict(num_registers=1, pool='gap', norm_after_pool=True),
        dict(num_registers=3, pool='map', position='none'),
        dict(stem_norm=True),
        dict(num_registers=2, stem_norm=True, pool='gap', layer_norm_epsilon=1e-2),
    ],
    ids=str,
)
def test_variants_equal_timm(fields):
    assert_equal(SMALL | fields, timm_vit)


@pytest.mark.slow
def test_gradients_of_registers_and_stem_norm_equal_timm():
    """The gradients of the squared logits by every parameter."""
    torch = interop.require('torch')
    fields = SMALL | dict(num_registers=3, stem_norm=True)
    images = np.random.default_rng(1).normal(size=(2, 16, 16, 3)).astype(np.float32)
    ours = models.build(fields, 7)
    theirs = interop.timm_vit(fields, (16, 16, 3), 7)
    params = randomised(ours, images)

    def loss(params):
        return (ours.apply({'params': params}, images) ** 2).mean()

    gradients = interop.to_timm(jax.jit(jax.grad(loss))(params))
    interop.load(theirs, interop.to_timm(params))
    (theirs(torch.from_numpy(images).permute(0, 3, 1, 2)) ** 2).mean().backward()
    expected = {name: x.grad for name, x in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, x in expected.items():
        if name.endswith('qkv.bias'):  # the gradient by the bias of keys is only rounding
            x[32:64] = 0
            gradients[name][32:64] = 0
        assert (gradients[name] - x).abs().max() <= 2e-5 * x.abs().max(), name


@pytest.mark.parametrize(
    ('units', 'patch', 'image_size'),
    [
        pytest.param((), 8, (64, 96), marks=pytest.mark.slow),  # like R+Ti/16
        ((1, 2, 3), 1, (40, 56)),  # like R50+B/16; stage 3 rounds its size up
        pytest.param((1, 1, 1, 1), 1, (32, 64), marks=pytest.mark.slow),  # like R50+B/32
    ],
    ids=['root', 'three-stages', 'four-stages'],
)
def test_hybrids_equal_timm(units, patch, image_size):
    assert_equal(
        SMALL | dict(patch_size=(patch, patch), num_layers=1, resnet=HYBRID | dict(units=units)),
        timm_vit,
        (*image_size, 3),
    )


def test_bit_equals_timm():
    """Twice as wide, with an image whose feature maps have odd sides: 35, 45, 23, 9, 5."""
    assert_equal(dict(resnet=BIT | dict(units=(1, 3, 1), width=32)), timm_bit, (35, 45, 3))


@pytest.mark.slow
@pytest.mark.parametrize('weight_epsilon_on', ['std', 'variance'])
@pytest.mark.parametrize('family', ['hybrid', 'bit'])
def test_large_epsilons_equal_timm(family, weight_epsilon_on):
    resnet = dict(
        units=(1, 2),
        group_norm_epsilon=0.1,
        weight_epsilon=0.01,
        weight_epsilon_on=weight_epsilon_on,
    )
    if family == 'bit':
        assert_equal(dict(resnet=BIT | resnet), timm_bit, (40, 56, 3))
    else:
        assert_equal(
            SMALL | dict(patch_size=(1, 1), num_layers=1, resnet=HYBRID | resnet),
            timm_vit,
            (40, 56, 3),
        )
