"""big_vision's .npz: position embeddings of patches alone, a pooling head, and two kinds of ResNet.

The class token has no position embedding there. Writing adds ours to the token itself, which
changes no logit; a model that comes back has a zero in its place. Before 2022 it had one, as all
tokens, in `Transformer/pos_embedding`. The position embedding may be fixed (sincos_2d): then no
array holds it. ResNets are BiT's (its models/bit_paper.py) or those of hybrids (models/bit.py).
"""

import logging
import math
import re

import numpy as np

from vit_jax.models import variants
from vit_jax.weights import limits
from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.layouts import google
from vit_jax.weights.table import Entry, flax_modules

log = logging.getLogger(__name__)

_STACKED = 'Transformer/encoderblock/'
_VIT = [
    *google.SHARED,
    *google.NEWER,
    Entry(('position/embedding',), 'pos_embedding'),
    Entry(('pool/probe',), 'MAPHead_0/probe'),
    *flax_modules(google.block('pool', 'MAPHead_0', 'norm', (0, 0, 0))),
]
_HEAD = flax_modules({'head': 'head'})
_BIT = [
    *flax_modules({'resnet/root_conv': 'conv_root', 'resnet/root_norm': 'gn_root'}),
    *flax_modules(google.unit('unit{j1}')),
    *_HEAD,
]
_BIT_PAPER = [
    *flax_modules(
        {'resnet/root_conv': 'root_block/conv_root', 'norm': 'norm-pre-head'}, 'four_axes'
    ),
    *flax_modules(google.unit('unit{j1:02}'), 'four_axes'),
    *_HEAD,
]
# What was in another place before 2022, and what had no name of its own while ViT-G was made.
_MOVED = [
    (r'Transformer/pos_embedding', 'pos_embedding'),
    (r'(probe|(MlpBlock|MultiHeadDotProductAttention|LayerNorm)_0/.+)', r'MAPHead_0/\1'),
]


def _read(contents):
    """The names and shapes of today's code, and a position of zeros for the class token."""
    if any('conv_root/' in name for name in contents.arrays):
        return _read_resnet(contents.arrays)
    arrays = {}
    for name, x in contents.arrays.items():
        new = next((re.sub(old, new, name) for old, new in _MOVED if re.fullmatch(old, name)), name)
        if name.startswith(_STACKED) and x.ndim:
            limits.check_count('layers', len(x))
            arrays |= {
                f'Transformer/encoderblock_{i}/{name.removeprefix(_STACKED)}': x[i]
                for i in range(len(x))
            }
        elif (
            new == 'pos_embedding'
            and 'cls' in contents.arrays
            and x.ndim == 3
            and (not _has_class_token(x.shape[1], old=name != new))
        ):
            arrays[new] = np.pad(x, ((0, 0), (1, 0), (0, 0)))
        else:
            arrays[new] = x
    position = {} if 'pos_embedding' in arrays else {'position': 'sincos_2d'}
    return Reading(arrays, google.FORMULAS | position, _VIT + google.OLDER)


def _has_class_token(positions, old):
    """As big_vision decides it for a square, and by where they are for other numbers."""
    square, with_token = (math.isqrt(n) ** 2 == n for n in (positions, positions - 1))
    return with_token or (old and not square)


def _read_resnet(arrays):
    """GroupNorms may have one axis or four."""
    paper = 'root_block/conv_root/kernel' in arrays
    if paper:
        log.warning(
            "big_vision's bit_paper.py pools the root's border as if nothing lay outside, "
            'BiT and this program as if zeros did. Logits of weights of BiT are right; '
            'those of weights trained in big_vision differ a little from its own.'
        )
    shape = (1, 1, 1, -1) if paper else (-1,)
    return Reading(
        {
            name: x.reshape(shape) if re.search(r'(^|/)(gn\w+|norm-pre-head)/', name) else x
            for name, x in arrays.items()
        },
        {},
        _BIT_PAPER if paper else _BIT,
    )


def _table(model):
    return (
        _VIT
        if 'hidden_size' in model
        else (_BIT_PAPER if model['resnet']['preactivation'] else _BIT)
    )


def _allowed_values(model, path):
    """A transformer has no ResNet; a ResNet has the formulas of its kind."""
    if 'hidden_size' in model:
        return (
            PLAIN
            | only(google.FORMULAS)
            | dict(resnet=(None,), position=('learned_1d', 'sincos_2d'), pool=('cls', 'gap', 'map'))
        )
    of_kind = variants.bit_resnet if model['resnet']['preactivation'] else variants.hybrid_resnet
    return google.formulas_of(of_kind(())) | PLAIN


def _refusals(weights, path):
    """Without the position of the class token, so many patches would be taken to have it."""
    if not {'cls', 'position'} <= weights.params.keys():
        return []
    patches = weights.params['position']['embedding'].shape[-2] - 1
    return (
        [
            f'{patches} patches, one more than a square has, would be read as a square and a class '
            'token'
        ]
        if _has_class_token(patches, old=False)
        else []
    )


def _finish(arrays, weights):
    """Adds the position embedding of the class token to the token."""
    if not {'cls', 'pos_embedding'} <= arrays.keys():
        return arrays
    position = arrays['pos_embedding']
    return arrays | {'cls': arrays['cls'] + position[:, :1], 'pos_embedding': position[:, 1:]}


def _usual_preprocess(weights):
    """With a head as configs/vit_i1k.py, without one as those of images and texts (SigLIP, LiT)."""
    if not weights.num_classes:
        return "big_vision's configs of images and texts squash them", google.SQUASHED
    return (
        "big_vision's configs of classes resize the short side by 256/224 and crop the middle "
        '(as --preprocess=resize=area does; this is near it)',
        google.SQUASHED | dict(fit='cover', crop_ratio=0.875, antialias=True),
    )


LAYOUT = Layout(
    mark=r'Transformer/encoderblock(_0)?/LayerNorm_0/scale|(root_block/)?conv_root/kernel',
    suffixes=('.npz',),
    read=_read,
    table=_table,
    allowed_values=_allowed_values,
    refusals=_refusals,
    finish=_finish,
    usual_preprocess=_usual_preprocess,
)
