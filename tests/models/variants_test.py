import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import variants

# ViT table 1 and the sizes published since, with class token, 1000-way linear head, 224 px;
# hybrids and ResNets as timm counts them.
PUBLISHED = {
    'ti16': 5_717_416,
    's16': 22_050_664,
    'b16': 86_567_656,
    'l16': 304_326_632,
    'h14': 632_045_800,
    'g14': 1_012_611_432,
    'G14': 1_844_440_680,
    'so400m14': 413_597_656,
    'r_ti16': 6_337_704,
    'r26_s32': 36_431_912,
    'r50_b16': 98_659_112,
    'r50_l32': 328_994_856,
    'r50x1': 25_549_352,
    'r101x1': 44_541_480,
    'r152x2': 236_335_208,
    'r152x4': 936_533_224,
    'axial_r50': 11_585_448,
}


EVERY_KIND = ('ti16', 'r_ti16', 'r50_b16', 'r50x1', 'axial_b16', 'axial_r50')


@functools.cache
def count(name):
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(models.build(name, 1000).init, jax.random.key(0), image)
    return sum(x.size for x in jax.tree.leaves(variables))


@pytest.mark.parametrize(
    'name',
    [
        name
        if name in ('ti16', 'b16', 'r50_b16', 'r50x1')
        else pytest.param(name, marks=pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_published_parameter_counts(name):
    assert count(name) == PUBLISHED[name]


def test_every_size_has_a_published_count():
    assert {re.match(r'so400m|\D', n).group() for n in PUBLISHED if n[0] not in 'ra'} == {
        re.match(r'so400m|\D', size).group() for size in variants.SIZES
    }


def transformer_count(v, channels, tokens, class_token=True, blocks_per_layer=1):
    d, m, (p, _) = v['hidden_size'], v['mlp_dim'], v['patch_size']
    block = 4 * (d * d + d) + (d * m + m) + (m * d + d) + 4 * d
    return (
        p * p * channels * d
        + d
        + (tokens + class_token) * d
        + class_token * d
        + blocks_per_layer * v['num_layers'] * block
        + 2 * d
        + d * 1000
        + 1000
    )


def resnet_count(units, width, preactivation):
    """Convolutions without bias, two numbers per channel and GroupNorm; and its output channels."""
    total, channels = 7 * 7 * 3 * width + (not preactivation) * 2 * width, width
    for stage, number in enumerate(units):
        w = width * 2**stage
        for unit in range(number):
            total += channels * w + 9 * w * w + w * 4 * w
            total += 2 * (channels + w + w) if preactivation else 2 * (w + w + 4 * w)
            if unit == 0:
                total += channels * 4 * w + (not preactivation) * 2 * 4 * w
            channels = 4 * w
    return total, channels


def axial_resnet_count(units, width, heads, side):
    """Axial-DeepLab, section 3.2 and figure 2, with norms that shift no attention logits."""
    total, channels, length = 7 * 7 * 3 * width + 2 * width, width, side // 4
    for stage, number in enumerate(units):
        w, out = 2 * width * 2**stage, 4 * width * 2**stage
        for unit in range(number):
            key = w // heads // 2  # and query; a value is twice as long
            attention = (w * 2 * w + 2 * 2 * w) + 3 * heads + (2 * length - 1) * 4 * key + 2 * 2 * w
            total += (channels * w + 2 * w) + 2 * attention + (w * out + 2 * out)
            if unit == 0:
                total, length = total + channels * out + 2 * out, length // (1 + (stage > 0))
            channels = out
    return total + channels * 1000 + 1000


def test_axial_resnet_is_the_source_s_without_dead_parameters():
    """axial50s of github.com/csrhddlam/axial-deeplab counts 11,586,216, axial50l 43,973,480.

    Each has 32 layers of attention with 24 biases of logits, that the softmax takes out again.
    """
    assert PUBLISHED['axial_r50'] == 11_586_216 - 32 * 24
    assert axial_resnet_count((3, 4, 6, 3), 64, 8, 224) == 43_973_480 - 32 * 24


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[] if name in EVERY_KIND else pytest.mark.nightly)
        for name in variants.names()
    ],
)
def test_every_name_counts_as_its_formula(name):
    v = variants.get(name)
    if name in variants.RESNETS:
        total, channels = resnet_count(v['resnet']['units'], v['resnet']['width'], True)
        assert count(name) == total + 2 * channels + channels * 1000 + 1000
    elif name in variants.AXIAL_RESNETS:
        assert count(name) == axial_resnet_count(*variants.AXIAL_RESNETS[name], 224)
    elif name in variants.HYBRIDS:
        total, channels = resnet_count(v['resnet']['units'], 64, False)
        tokens = 49 if name == 'r_ti16' else (224 // int(name[-2:])) ** 2
        assert count(name) == total + transformer_count(v, channels, tokens)
    else:
        axial = name in variants.AXIAL
        tokens = (224 // v['patch_size'][0]) ** 2
        assert count(name) == transformer_count(v, 3, tokens, not axial, 1 + axial)


def test_the_paper_s_hybrids_and_resnets_are_there():
    """Section 4.1, table 6 and appendix D.6; R+Ti/16 and R26+S/32 as released."""
    assert set(variants.names()) >= {
        'r_ti16',
        'r26_s32',
        *(f'r50_{s}{p}' for s, p in itertools.product('bl', (16, 32))),
        'r50x1',
        'r50x2',
        'r101x1',
        'r152x1',
        'r152x2',
        'r152x4',
        'r200x3',
        'axial_b16',
        'axial_b32',
        'axial_r50',
    }


def test_constants_of_the_resnets():
    """Hybrids as in the code of the paper, the baseline as in BiT's."""
    assert variants.get('r50_l32')['resnet'] == dict(
        units=(3, 4, 6, 3),
        width=64,
        preactivation=False,
        fixed_padding=False,
        num_groups=32,
        group_norm_epsilon=1e-6,
        weight_epsilon=1e-5,
        weight_epsilon_on='std',
    )
    assert variants.get('r152x2')['resnet'] == dict(
        units=(3, 8, 36, 3),
        width=128,
        preactivation=True,
        fixed_padding=True,
        num_groups=32,
        group_norm_epsilon=1e-5,
        weight_epsilon=1e-10,
        weight_epsilon_on='variance',
    )
    assert variants.get('axial_r50') == dict(
        axial_heads=8,
        resnet=dict(
            units=(3, 4, 6, 3),
            width=32,
            preactivation=False,
            fixed_padding=True,
            num_groups=32,
            group_norm_epsilon=1e-5,
            weight_epsilon=1e-10,
            weight_epsilon_on='variance',
        ),
    )


@pytest.mark.parametrize(
    ('name', 'near'),
    [
        ('b17', 'b16'),
        ('r50+b/32', 'r50_b32'),
        ('R50x1', 'r50x1'),
        *((name, 'b16') for name in ('B/16', 'B16')),
        ('R50+ViT-B/16', 'r50_b16'),
    ],
)
def test_unknown_model_names_the_nearest(name, near):
    message = f'unknown model {re.escape(repr(name))}. Did you mean {near}[,?]'
    with pytest.raises(UserError, match=message):
        models.build(name, 10)


@pytest.mark.parametrize(
    ('name', 'ours'),
    [
        ('vit_tiny_patch16_224', 'ti16'),
        ('google/vit-large-patch32-384', 'l32'),
        ('vit_gigantic_patch14_224', 'G14'),
        ('vit_so400m_patch14_siglip_384', 'so400m14'),
        ('deit_base_distilled_patch16_224', 'b16'),
        ('vit_tiny', 'ti16'),
        ('vit_b16', 'b16'),
        ('ViT-B/16', 'b16'),
        ('ViT-H/14', 'h14'),
        ('ViT-G/14', 'G14'),
        ('ViT-huge', 'h14'),
        ('deit-small', 's16'),
        ('vit_b_16', 'b16'),
        ('ViT-L/32', 'l32'),
        ('ViT-g/14', 'g14'),
        ('ViT-G', 'G14'),
    ],
)
def test_names_of_other_programs(name, ours):
    with pytest.raises(UserError, match=f'unknown model {name!r}. Here it is {ours}. A name is'):
        models.build(name, 10)


@pytest.mark.parametrize('name', variants.names())
def test_sizes_tell_the_name(name):
    assert variants.name_of(models.fields(name)) == name
    other = models.fields(name)
    other['resnet' if 'hidden_size' not in other else 'num_layers'] = None
    assert variants.name_of(other) is None


def test_g_and_G_are_two_models():
    assert variants.get('g14') != variants.get('G14')


@pytest.mark.parametrize('name', variants.names())
def test_all_fields_of_a_name_build_its_model(name):
    assert models.build(models.fields(name), 10) == models.build(name, 10)


def test_fields_and_defaults_of_config_model():
    """What configs and workdirs rely on."""
    computation = dict(head_bias_init=0.0, dtype='float32', unroll=0, remat_policy='auto')
    assert models.fields('b16') == computation | dict(
        patch_size=(16, 16),
        hidden_size=768,
        num_layers=12,
        mlp_dim=3072,
        num_heads=12,
        resnet=None,
        attention='full',
        block='sequential',
        position='learned_1d',
        position_at='stem',
        pool='cls',
        representation_size=0,
        partial_patches='refuse',
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        attention_kernel='auto',
        linear_kernel='auto',
        stochastic_depth_rate=0.0,
        num_registers=0,
        stem_norm=False,
        norm_after_pool=False,
        layer_scale_init=0.0,
        gelu='tanh',
        layer_norm_epsilon=1e-6,
    )
    assert models.fields('r50x1') == computation | dict(
        resnet=variants.bit_resnet((3, 4, 6, 3)), axial_heads=0
    )
