"""Google's .npz: Vision Transformers and hybrids of the ViT paper, and BiT's ResNets.

Encoder blocks have older and newer names. Files are written with the older names, which the
released files have and timm reads.
"""

import re
from collections.abc import Mapping

from vit_jax.models import variants
from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.model import flatten
from vit_jax.weights.table import Prefixes, entries, flax_modules

FORMULAS = dict(gelu='tanh', layer_norm_epsilon=1e-6)
# From input_pipeline.py of vision_transformer and of BiT.
SQUASHED = dict(
    fit='squash',
    crop_ratio=1.0,
    resize='bilinear',
    antialias=False,
    uint8_resize=False,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
)


def attention_and_mlp(
    our_norm: str, attention: int = 0, layer_norm: int = 0, mlp: int = 0
) -> dict[str, str]:
    """Modules {ours: theirs} of an encoder block without its first norm, or of a pooling head.

    Args:
      our_norm: our name of the norm before the MLP.
      attention: number in their name of the attention.
      layer_norm: number in their name of that norm.
      mlp: number in their name of the MLP.
    """
    return {
        'attention/query': f'MultiHeadDotProductAttention_{attention}/query',
        'attention/key': f'MultiHeadDotProductAttention_{attention}/key',
        'attention/value': f'MultiHeadDotProductAttention_{attention}/value',
        'attention/out': f'MultiHeadDotProductAttention_{attention}/out',
        our_norm: f'LayerNorm_{layer_norm}',
        'mlp/dense1': f'MlpBlock_{mlp}/Dense_0',
        'mlp/dense2': f'MlpBlock_{mlp}/Dense_1',
    }


_BLOCK = ('blocks/{i}/', 'Transformer/encoderblock_{i}/')
# The older code, the newer code and big_vision have these names in common.
SHARED = [
    *entries({'cls': 'cls'}),
    *flax_modules(
        {
            'embedding': 'embedding',
            'norm': 'Transformer/encoder_norm',
            'pre_logits': 'pre_logits',
            'head': 'head',
        }
    ),
    *flax_modules({'norm1': 'LayerNorm_0'}, within=_BLOCK),
]
# Newer code, like big_vision, numbers the modules of each class separately; older code numbers all
# modules together.
NEWER = flax_modules(attention_and_mlp('norm2', layer_norm=1), within=_BLOCK)
OLDER = flax_modules(attention_and_mlp('norm2', attention=1, layer_norm=2, mlp=3), within=_BLOCK)

# Modules {ours: theirs} of a residual unit.
UNIT = {
    'conv1': 'conv1',
    'conv2': 'conv2',
    'conv3': 'conv3',
    'conv_proj': 'conv_proj',
    'norm1': 'gn1',
    'norm2': 'gn2',
    'norm3': 'gn3',
    'norm_proj': 'gn_proj',
}


def within_unit(name: str) -> Prefixes:
    """Prefixes of a residual unit; `name` is its name within a stage, such as 'unit{j1}'."""
    return 'resnet/{s}/{j}/', f'block{{s1}}/{name}/'


_VIT = [
    *SHARED,
    *entries({'position/embedding': 'Transformer/posembed_input/pos_embedding'}),
    *OLDER,
    *flax_modules({'resnet/root_conv': 'conv_root', 'resnet/root_norm': 'gn_root'}, 'four_axes'),
    *flax_modules(UNIT, 'four_axes', within=within_unit('unit{j1}')),
]

_BIT = [
    *entries(
        {
            'resnet/root_conv/kernel': 'resnet/root_block/standardized_conv2d/kernel',
            'norm/scale': 'resnet/group_norm/gamma',
            'norm/bias': 'resnet/group_norm/beta',
            'head/bias': 'resnet/head/conv2d/bias',
        }
    ),
    *entries({'head/kernel': 'resnet/head/conv2d/kernel'}, 'dense_as_google_conv'),
    *entries(
        {
            'conv_proj/kernel': 'a/proj/standardized_conv2d/kernel',
            'norm1/scale': 'a/group_norm/gamma',
            'norm1/bias': 'a/group_norm/beta',
            'conv1/kernel': 'a/standardized_conv2d/kernel',
            'norm2/scale': 'b/group_norm/gamma',
            'norm2/bias': 'b/group_norm/beta',
            'conv2/kernel': 'b/standardized_conv2d/kernel',
            'norm3/scale': 'c/group_norm/gamma',
            'norm3/bias': 'c/group_norm/beta',
            'conv3/kernel': 'c/standardized_conv2d/kernel',
        },
        within=('resnet/{s}/{j}/', 'resnet/block{s1}/unit{j1:02}/'),
    ),
]


def _read(contents):
    """Reads arrays with GroupNorms of one axis or four, and blocks with older or newer names."""
    if any('root_block/' in name for name in contents.arrays):
        return Reading(contents.arrays, {}, _BIT)
    arrays = dict(contents.arrays)
    for name, x in contents.arrays.items():
        if re.search(r'(^|/)gn\w+/', name):
            arrays[name] = x.reshape(1, 1, 1, -1)
    return Reading(arrays, FORMULAS, _VIT + NEWER)


def formulas_of(resnet: Mapping) -> dict[str, tuple]:
    """The allowed values of the fields of a ResNet; its sizes may have any values."""
    sizes = ('units', 'width')
    return only({f'resnet.{name}': x for name, x in resnet.items() if name not in sizes})


def _allowed_values(model, path):
    """Allows a ResNet with the formulas of BiT or of the hybrids."""
    make_resnet = variants.hybrid_resnet if 'hidden_size' in model else variants.bit_resnet
    return formulas_of(make_resnet(())) | PLAIN | only(FORMULAS) | dict(pool=('cls', 'gap'))


def _refusals(weights, path):
    if all(x.dtype.name != 'bfloat16' for x in flatten(weights.params).values()):
        return []
    return [
        "the arrays are bfloat16, which .npz files store as bytes without a type; Google's code "
        'and timm cannot read them: add --dtype=float32, or --to=big_vision, whose code can'
    ]


def _table(model):
    return _VIT if 'hidden_size' in model else _BIT


LAYOUT = Layout(
    mark=r'Transformer/posembed_input/pos_embedding|(resnet/)?root_block/standardized_conv2d/kernel',
    suffixes=('.npz',),
    read=_read,
    table=_table,
    allowed_values=_allowed_values,
    refusals=_refusals,
    usual_preprocess=lambda weights: ("Google's programs of this layout squash them", SQUASHED),
)
