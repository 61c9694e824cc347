"""big_vision's .npz: position embeddings of patches alone, and a pooling head.

The class token has no position embedding there. Writing adds ours to the token itself, which
changes no logit; a model that comes back has a zero in its place. The position embedding may be
fixed (sincos_2d): then no array holds it.
"""

import numpy as np

from vit_jax.weights import limits
from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.layouts import google
from vit_jax.weights.table import Entry, flax_modules

_STACKED = 'Transformer/encoderblock/'
_TABLE = [
    *google.SHARED, *google.NEWER, Entry(('position/embedding',), 'pos_embedding'),
    Entry(('pool/probe',), 'MAPHead_0/probe'),
    *flax_modules(google.block('pool', 'MAPHead_0', 'norm', (0, 0, 0)))]


def _read(contents):
    """Unstacks blocks, and gives the class token a position embedding of zeros."""
    arrays = {}
    for name, x in contents.arrays.items():
        if name.startswith(_STACKED) and x.ndim:
            limits.check_count('layers', len(x))
            arrays |= {f'Transformer/encoderblock_{i}/{name.removeprefix(_STACKED)}': x[i]
                       for i in range(len(x))}
        elif name == 'pos_embedding' and 'cls' in contents.arrays and x.ndim == 3:
            arrays[name] = np.pad(x, ((0, 0), (1, 0), (0, 0)))
        else:
            arrays[name] = x
    position = {} if 'pos_embedding' in arrays else {'position': 'sincos_2d'}
    return Reading(arrays, google.FORMULAS | position, _TABLE)


def _finish(arrays, weights):
    """Adds the position embedding of the class token to the token."""
    if not {'cls', 'pos_embedding'} <= arrays.keys():
        return arrays
    position = arrays['pos_embedding']
    return arrays | {'cls': arrays['cls'] + position[:, :1], 'pos_embedding': position[:, 1:]}


LAYOUT = Layout(
    mark=r'Transformer/encoderblock(_0)?/LayerNorm_0/scale', suffixes=('.npz',), read=_read,
    table=lambda model: _TABLE,
    allowed_values=lambda model, path: PLAIN | only(google.FORMULAS) | dict(
        resnet=(None,), position=('learned_1d', 'sincos_2d'), pool=('cls', 'gap', 'map')),
    finish=_finish)
