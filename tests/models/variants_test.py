import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from tests.support.errors import refused
from vit_jax import models
from vit_jax.models import variants

# Parameters with class token, 1000-way linear head and 224 px. The numbers of transformers are from
# ViT table 1 and later papers, the numbers of hybrids and ResNets from timm.
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


FAST = ('ti16', 'b16', 'r50_b16', 'r50x1')


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PUBLISHED],
)
def test_parameter_counts_equal_published_ones(name):
    assert count(name) == PUBLISHED[name]


def test_every_size_has_a_published_count():
    assert {re.match(r'so400m|\D', n).group() for n in PUBLISHED if n[0] not in 'ra'} == {
        re.match(r'so400m|\D', size).group() for size in variants.SIZES
    }


def transformer_count(v, channels, tokens, class_token=True, blocks_per_layer=1):
    d = v['hidden_size']
    m = v['mlp_dim']
    p, _ = v['patch_size']
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
    """Returns the number of parameters and of output channels.

    Convolutions have no bias, and GroupNorms have two numbers per channel.
    """
    total = 7 * 7 * 3 * width
    if not preactivation:
        total += 2 * width
    channels = width
    for stage, number in enumerate(units):
        w = width * 2**stage
        for unit in range(number):
            total += channels * w + 9 * w * w + w * 4 * w
            norms = channels + w + w if preactivation else w + w + 4 * w
            total += 2 * norms
            if unit == 0:
                total += channels * 4 * w
                if not preactivation:
                    total += 2 * 4 * w
            channels = 4 * w
    return total, channels


def axial_resnet_count(units, width, heads, side):
    """Axial-DeepLab, section 3.2 and figure 2, with norms without a shift of attention logits."""
    total = 7 * 7 * 3 * width + 2 * width
    channels = width
    length = side // 4
    for stage, number in enumerate(units):
        w = 2 * width * 2**stage
        out = 4 * width * 2**stage
        for unit in range(number):
            key = w // heads // 2  # the size of a key or query; a value is twice as long
            attention = (w * 2 * w + 2 * 2 * w) + 3 * heads + (2 * length - 1) * 4 * key + 2 * 2 * w
            total += (channels * w + 2 * w) + 2 * attention + (w * out + 2 * out)
            if unit == 0:
                total += channels * out + 2 * out
                if stage > 0:
                    length //= 2
            channels = out
    return total + channels * 1000 + 1000


def test_axial_resnet_equals_the_source_without_dead_parameters():
    """axial50s of github.com/csrhddlam/axial-deeplab has 11,586,216, axial50l 43,973,480.

    Each has 32 layers of attention with 24 biases of logits, which have no effect in a softmax.
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
def test_parameter_counts_equal_formulas(name):
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
        is_axial = name in variants.AXIAL
        tokens = (224 // v['patch_size'][0]) ** 2
        blocks_per_layer = 2 if is_axial else 1
        assert count(name) == transformer_count(v, 3, tokens, not is_axial, blocks_per_layer)


def test_hybrids_and_resnets_of_the_paper_exist():
    """Section 4.1, table 6 and appendix D.6, and the released R+Ti/16 and R26+S/32."""
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
    """Hybrids have the constants of the paper's code. The baseline has BiT's constants."""
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
    ('name', 'nearest'),
    [
        ('b17', 'b16'),
        ('r50+b/32', 'r50_b32'),
        ('R50x1', 'r50x1'),
        *((name, 'b16') for name in ('B/16', 'B16')),
        ('R50+ViT-B/16', 'r50_b16'),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest_name(name, nearest):
    with refused(kind='unknown', field='model', value=name) as error:
        models.build(name, 10)
    start = f'unknown model {name!r}. Did you mean {nearest}'
    assert str(error.value).startswith((f'{start},', f'{start}?'))


@pytest.mark.parametrize(
    ('name', 'our_name'),
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
def test_names_of_other_projects_are_translated(name, our_name):
    with refused(kind='unknown', field='model', value=name) as error:
        models.build(name, 10)
    expected = f'unknown model {name!r}. Here its name is {our_name}. A name is'
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize('name', variants.names())
def test_sizes_determine_the_name(name):
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
    """Configs and workdirs rely on them."""
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
