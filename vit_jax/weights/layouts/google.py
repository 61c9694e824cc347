"""Google's .npz: Vision Transformers and hybrids of the ViT paper, and BiT's ResNets.

Names of encoder blocks come in two generations. Written is the one of the released files, which
timm reads too.
"""

import re

from vit_jax.models import variants
from vit_jax.weights.table import Entry, same

MARK = r'Transformer/posembed_input/pos_embedding|(resnet/)?root_block/standardized_conv2d/kernel'
SUFFIXES = ('.npz',)
FIELDS = dict(gelu='tanh', layer_norm_epsilon=1e-6)

def encoder(norm2: str, attention: str, mlp: str) -> list[Entry]:
    """Entries of the encoder blocks, whose modules are numbered in one way or another."""
    ours, theirs = 'blocks/{i}', 'Transformer/encoderblock_{i}'
    return [*same(f'{ours}/norm1', f'{theirs}/LayerNorm_0', 'scale bias'),
            *attention_entries(f'{ours}/attention', f'{theirs}/{attention}'),
            *same(f'{ours}/norm2', f'{theirs}/{norm2}', 'scale bias'),
            *mlp_entries(f'{ours}/mlp', f'{theirs}/{mlp}')]


def attention_entries(ours: str, theirs: str) -> list[Entry]:
    """Entries of an attention layer."""
    return [entry for name in ('query', 'key', 'value', 'out')
            for entry in same(f'{ours}/{name}', f'{theirs}/{name}')]


def mlp_entries(ours: str, theirs: str) -> list[Entry]:
    """Entries of an MLP."""
    return same(f'{ours}/dense1', f'{theirs}/Dense_0') + same(f'{ours}/dense2', f'{theirs}/Dense_1')


# Shared by both generations and big_vision, whose blocks are numbered as in the newer one.
OUTSIDE = [Entry(('cls',), 'cls'), *same('embedding', 'embedding'),
           *same('norm', 'Transformer/encoder_norm', 'scale bias'),
           *same('pre_logits', 'pre_logits'), *same('head', 'head')]
NEWER = encoder('LayerNorm_1', 'MultiHeadDotProductAttention_0', 'MlpBlock_0')

_UNIT = 'resnet/{s}/{j}'
_HYBRID = [
    *same('resnet/root_conv', 'conv_root', 'kernel'),
    *same('resnet/root_norm', 'gn_root', 'scale bias', 'four_axes'),
    *(entry for n in (1, 2, 3, '_proj') for entry in (
        *same(f'{_UNIT}/conv{n}', f'block{{s1}}/unit{{j1}}/conv{n}', 'kernel'),
        *same(f'{_UNIT}/norm{n}', f'block{{s1}}/unit{{j1}}/gn{n}', 'scale bias', 'four_axes')))]

_VIT = [*OUTSIDE, Entry(('position/embedding',), 'Transformer/posembed_input/pos_embedding'),
        *encoder('LayerNorm_2', 'MultiHeadDotProductAttention_1', 'MlpBlock_3'), *_HYBRID]

_CONV, _NORM = 'standardized_conv2d/kernel', 'group_norm'


def _bit_norm(ours, theirs):
    return [Entry((f'{ours}/scale',), f'{theirs}/{_NORM}/gamma'),
            Entry((f'{ours}/bias',), f'{theirs}/{_NORM}/beta')]


_BIT = [
    Entry(('resnet/root_conv/kernel',), f'resnet/root_block/{_CONV}'),
    *(entry for n, part in enumerate('abc', start=1) for entry in (
        Entry((f'{_UNIT}/conv{n}/kernel',), f'resnet/block{{s1}}/unit{{j01}}/{part}/{_CONV}'),
        *_bit_norm(f'{_UNIT}/norm{n}', f'resnet/block{{s1}}/unit{{j01}}/{part}'))),
    Entry((f'{_UNIT}/conv_proj/kernel',), f'resnet/block{{s1}}/unit{{j01}}/a/proj/{_CONV}'),
    *_bit_norm('norm', 'resnet'),
    Entry(('head/kernel',), 'resnet/head/conv2d/kernel', 'dense_as_google_conv'),
    Entry(('head/bias',), 'resnet/head/conv2d/bias')]


def table(model: dict) -> list[Entry]:
    """What an array of this model is called."""
    return _VIT if 'hidden_size' in model else _BIT


def prepare(arrays: dict, sidecars: dict) -> tuple[dict, list[Entry]]:
    """The arrays with GroupNorms as in the released files, and a table with all their names."""
    if any('root_block/' in name for name in arrays):
        return arrays, _BIT
    return {name: x.reshape(1, 1, 1, -1) if re.search(r'(^|/)gn\w+/', name) else x
            for name, x in arrays.items()}, _VIT + NEWER


def known(arrays: dict, sidecars: dict) -> tuple[dict, list | None, dict | None]:
    """What Google's code computes; the arrays come alone."""
    return {} if any('root_block/' in name for name in arrays) else FIELDS, None, None


def holds(model: dict, path: str) -> dict[str, tuple]:
    """Values of fields that the layout can hold."""
    if 'hidden_size' not in model:
        return resnet_values(variants.bit_resnet(()))
    resnet = resnet_values(variants.hybrid_resnet(())) if model['resnet'] else {}
    return resnet | dict(position=('learned_1d',), pool=('cls', 'gap'), layer_scale_init=(0.0,),
                         **{name: (value,) for name, value in FIELDS.items()})


def resnet_values(resnet: dict) -> dict[str, tuple]:
    """What `holds` says about a ResNet that has these fields but any sizes."""
    return {f'resnet.{name}': (value,) for name, value in resnet.items()
            if name not in ('units', 'width')}


def finish(arrays: dict, weights) -> tuple[dict, dict]:
    """The arrays as they are written, and the JSON files beside them: none."""
    return arrays, {}
