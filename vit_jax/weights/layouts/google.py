"""Google's .npz: Vision Transformers and hybrids of the ViT paper, and BiT's ResNets.

Names of encoder blocks come in two generations. Files are written with those of the released
files, which timm reads too.
"""

import re
from collections.abc import Mapping

from vit_jax.models import variants
from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.model import flatten
from vit_jax.weights.table import Entry, flax_modules

FORMULAS = dict(gelu='tanh', layer_norm_epsilon=1e-6)
# vision_transformer's and BiT's input_pipeline.py.
SQUASHED = dict(
    fit='squash',
    crop_ratio=1.0,
    resize='bilinear',
    antialias=False,
    uint8_resize=False,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
)


def block(ours: str, theirs: str, norm: str, numbers: tuple[int, int, int]) -> dict[str, str]:
    """Modules of an encoder block, without its first norm, or of a pooling head.

    `norm` is our name of its norm; `numbers` are in the names of its attention, norm and MLP.
    """
    attention, layer_norm, mlp = numbers
    return {
        **{
            f'{ours}/attention/{name}': f'{theirs}/MultiHeadDotProductAttention_{attention}/{name}'
            for name in ('query', 'key', 'value', 'out')
        },
        f'{ours}/{norm}': f'{theirs}/LayerNorm_{layer_norm}',
        f'{ours}/mlp/dense1': f'{theirs}/MlpBlock_{mlp}/Dense_0',
        f'{ours}/mlp/dense2': f'{theirs}/MlpBlock_{mlp}/Dense_1',
    }


_BLOCK, _THEIRS = 'blocks/{i}', 'Transformer/encoderblock_{i}'
# Shared by both generations and big_vision, whose blocks are numbered as in the newer one.
SHARED = [
    Entry(('cls',), 'cls'),
    *flax_modules(
        {
            'embedding': 'embedding',
            f'{_BLOCK}/norm1': f'{_THEIRS}/LayerNorm_0',
            'norm': 'Transformer/encoder_norm',
            'pre_logits': 'pre_logits',
            'head': 'head',
        }
    ),
]
NEWER = flax_modules(block(_BLOCK, _THEIRS, 'norm2', (0, 1, 0)))
OLDER = flax_modules(block(_BLOCK, _THEIRS, 'norm2', (1, 2, 3)))

_UNIT = 'resnet/{s}/{j}'


def unit(theirs: str) -> dict[str, str]:
    """Modules of a residual unit; `theirs` is its name within a stage, such as 'unit{j1}'."""
    return {
        f'{_UNIT}/{ours}{n}': f'block{{s1}}/{theirs}/{name}{n}'
        for ours, name in (('conv', 'conv'), ('norm', 'gn'))
        for n in (1, 2, 3, '_proj')
    }


_VIT = [
    *SHARED,
    Entry(('position/embedding',), 'Transformer/posembed_input/pos_embedding'),
    *OLDER,
    *flax_modules(
        {'resnet/root_conv': 'conv_root', 'resnet/root_norm': 'gn_root', **unit('unit{j1}')},
        'four_axes',
    ),
]

_BIT_UNIT = 'resnet/block{s1}/unit{j1:02}'
_BIT = [
    *(
        Entry((f'{ours}/kernel',), f'{theirs}/standardized_conv2d/kernel')
        for ours, theirs in {
            'resnet/root_conv': 'resnet/root_block',
            f'{_UNIT}/conv_proj': f'{_BIT_UNIT}/a/proj',
            **{f'{_UNIT}/conv{n}': f'{_BIT_UNIT}/{part}' for n, part in enumerate('abc', 1)},
        }.items()
    ),
    *(
        Entry((f'{ours}/{leaf}',), f'{theirs}/group_norm/{their_leaf}')
        for ours, theirs in {
            'norm': 'resnet',
            **{f'{_UNIT}/norm{n}': f'{_BIT_UNIT}/{part}' for n, part in enumerate('abc', 1)},
        }.items()
        for leaf, their_leaf in (('scale', 'gamma'), ('bias', 'beta'))
    ),
    Entry(('head/kernel',), 'resnet/head/conv2d/kernel', 'dense_as_google_conv'),
    Entry(('head/bias',), 'resnet/head/conv2d/bias'),
]


def _read(contents):
    """GroupNorms may have one axis or four, and blocks either generation of names."""
    if any('root_block/' in name for name in contents.arrays):
        return Reading(contents.arrays, {}, _BIT)
    arrays = {
        name: x.reshape(1, 1, 1, -1) if re.search(r'(^|/)gn\w+/', name) else x
        for name, x in contents.arrays.items()
    }
    return Reading(arrays, FORMULAS, _VIT + NEWER)


def formulas_of(resnet: Mapping) -> dict[str, tuple]:
    """Allowed values of the fields of a ResNet, which may have any sizes."""
    return only(
        {
            f'resnet.{name}': value
            for name, value in resnet.items()
            if name not in ('units', 'width')
        }
    )


def _allowed_values(model, path):
    """A ResNet has the formulas of BiT, or those of the hybrids."""
    resnet = (variants.hybrid_resnet if 'hidden_size' in model else variants.bit_resnet)(())
    return formulas_of(resnet) | PLAIN | only(FORMULAS) | dict(pool=('cls', 'gap'))


def _refusals(weights, path):
    if all(x.dtype.name != 'bfloat16' for x in flatten(weights.params).values()):
        return []
    return [
        "the arrays are bfloat16, which .npz files state as bytes of no type; Google's code "
        'and timm cannot read them: add --dtype=float32, or --to=big_vision, whose code can'
    ]


LAYOUT = Layout(
    mark=r'Transformer/posembed_input/pos_embedding|(resnet/)?root_block/standardized_conv2d/kernel',
    suffixes=('.npz',),
    read=_read,
    table=lambda model: _VIT if 'hidden_size' in model else _BIT,
    allowed_values=_allowed_values,
    refusals=_refusals,
    usual_preprocess=lambda weights: ("Google's programs of this layout squash them", SQUASHED),
)
