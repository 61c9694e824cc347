"""big_vision's .npz: position embeddings of patches alone, a pooling head, and two kinds of ResNet.

The class token has no position embedding in big_vision. Writing adds our embedding to the token
itself, which changes no logit; reading gives the token an embedding of zeros. Before 2022 it had
one, like all tokens, in `Transformer/pos_embedding`. The position embedding may be fixed
(sincos_2d); then no array stores it. ResNets are BiT's (models/bit_paper.py in big_vision) or have
the formulas of the hybrids (models/bit.py).
"""

import logging
import math
import re

import numpy as np

from vit_jax.models import variants
from vit_jax.weights import limits
from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.layouts import google
from vit_jax.weights.table import entries, flax_modules

log = logging.getLogger(__name__)

_VIT = [
    *google.SHARED,
    *google.NEWER,
    *entries(
        {
            'position/embedding': 'pos_embedding',
            'pool/probe': 'MAPHead_0/probe',
        }
    ),
    *flax_modules(google.attention_and_mlp('norm'), within=('pool/', 'MAPHead_0/')),
]
_HEAD = flax_modules({'head': 'head'})
_BIT = [
    *flax_modules({'resnet/root_conv': 'conv_root', 'resnet/root_norm': 'gn_root'}),
    *flax_modules(google.UNIT, within=google.within_unit('unit{j1}')),
    *_HEAD,
]
_BIT_PAPER = [
    *flax_modules(
        {'resnet/root_conv': 'root_block/conv_root', 'norm': 'norm-pre-head'}, 'four_axes'
    ),
    *flax_modules(google.UNIT, 'four_axes', within=google.within_unit('unit{j1:02}')),
    *_HEAD,
]

# Names of earlier versions: positions until 2022, and the pooling head while ViT-G was made.
_RENAMED = [
    (r'Transformer/pos_embedding', 'pos_embedding'),
    (r'(probe|(MlpBlock|MultiHeadDotProductAttention|LayerNorm)_0/.+)', r'MAPHead_0/\1'),
]
_STACKED = 'Transformer/encoderblock/'  # a model may store all blocks in one array


def _read(contents):
    """Converts arrays to today's names and shapes; the class token gets zeros as its position."""
    if any('conv_root/' in name for name in contents.arrays):
        return _read_resnet(contents.arrays)
    arrays = {}
    for name, x in contents.arrays.items():
        new_name = _new_name(name)
        if name.startswith(_STACKED) and x.ndim:
            arrays |= _unstacked(name.removeprefix(_STACKED), x)
        elif new_name == 'pos_embedding':
            is_old = name != new_name
            arrays[new_name] = _positions_of_all_tokens(x, 'cls' in contents.arrays, is_old)
        else:
            arrays[new_name] = x
    fields = dict(google.FORMULAS)
    if 'pos_embedding' not in arrays:
        fields['position'] = 'sincos_2d'
    return Reading(arrays, fields, _VIT + google.OLDER)


def _new_name(name):
    for old, new in _RENAMED:
        if re.fullmatch(old, name):
            return re.sub(old, new, name)
    return name


def _unstacked(name, x):
    limits.check_count('layers', len(x))
    return {f'Transformer/encoderblock_{i}/{name}': layer for i, layer in enumerate(x)}


def _positions_of_all_tokens(positions, has_class_token, is_old):
    """Adds zeros for the class token if only patches have positions."""
    if not has_class_token or positions.ndim != 3:
        return positions
    if _include_class_token(positions.shape[1], is_old):
        return positions
    return np.pad(positions, ((0, 0), (1, 0), (0, 0)))


def _include_class_token(positions, is_old):
    """Whether this number of positions includes the class token.

    big_vision expects the number of patches to be a square. If neither number is a square, the
    older name of the array decides.
    """
    is_square = math.isqrt(positions) ** 2 == positions
    patches = max(0, positions - 1)
    is_square_and_token = math.isqrt(patches) ** 2 == patches
    return is_square_and_token or (is_old and not is_square)


def _read_resnet(arrays):
    """Reads a ResNet, whose GroupNorms may have one axis or four."""
    is_paper = 'root_block/conv_root/kernel' in arrays
    if is_paper:
        log.warning(
            "big_vision's bit_paper.py pools the border of the root without padding; BiT and "
            'vit_jax pad it with zeros. Logits of weights from BiT are right; logits of weights '
            "that were trained in big_vision differ a little from big_vision's."
        )
        return Reading(_with_group_norms(arrays, (1, 1, 1, -1)), {}, _BIT_PAPER)
    return Reading(_with_group_norms(arrays, (-1,)), {}, _BIT)


def _with_group_norms(arrays, shape):
    """The arrays, with GroupNorms reshaped to `shape`."""
    reshaped = dict(arrays)
    for name, x in arrays.items():
        if re.search(r'(^|/)(gn\w+|norm-pre-head)/', name):
            reshaped[name] = x.reshape(shape)
    return reshaped


def _table(model):
    if 'hidden_size' in model:
        return _VIT
    return _BIT_PAPER if model['resnet']['preactivation'] else _BIT


def _allowed_values(model, path):
    """Allows no ResNet in a transformer; a ResNet must have the formulas of its kind."""
    if 'hidden_size' in model:
        transformer = dict(
            resnet=(None,), position=('learned_1d', 'sincos_2d'), pool=('cls', 'gap', 'map')
        )
        return PLAIN | only(google.FORMULAS) | transformer
    is_paper = model['resnet']['preactivation']
    make_resnet = variants.bit_resnet if is_paper else variants.hybrid_resnet
    return google.formulas_of(make_resnet(())) | PLAIN


def _refusals(weights, path):
    """Refuses a number of patches that would be read as patches and a class token."""
    if not {'cls', 'position'} <= weights.params.keys():
        return []
    patches = weights.params['position']['embedding'].shape[-2] - 1
    if not _include_class_token(patches, is_old=False):
        return []
    return [
        f'{patches} patches, one more than a square has, would be read as a square and a class '
        'token'
    ]


def _finish(arrays, weights):
    """Adds the position embedding of the class token to the token."""
    if not {'cls', 'pos_embedding'} <= arrays.keys():
        return arrays
    position = arrays['pos_embedding']
    return arrays | {'cls': arrays['cls'] + position[:, :1], 'pos_embedding': position[:, 1:]}


def _usual_preprocess(weights):
    """Preprocessing of configs/vit_i1k.py with a head, otherwise of SigLIP and LiT."""
    if not weights.num_classes:
        return "big_vision's configs of images and texts squash them", google.SQUASHED
    return (
        "big_vision's configs of classes resize the short side by 256/224 and crop the middle "
        '(as --preprocess=resize=area does; the following is close to it)',
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
