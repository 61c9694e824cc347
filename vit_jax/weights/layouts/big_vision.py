"""big_vision's .npz: position embeddings of patches alone, and a pooling head.

The class token has no position embedding there. Writing adds ours to the token itself, which
changes no logit; a model that comes back has a zero in its place. The position embedding may be
fixed (sincos_2d): then no array holds it.
"""

import numpy as np

from vit_jax.weights.layouts import google
from vit_jax.weights.table import Entry, same

MARK = r'Transformer/encoderblock(_0)?/LayerNorm_0/scale'
SUFFIXES = ('.npz',)
_STACKED = 'Transformer/encoderblock/'
_TABLE = [
    *google.OUTSIDE, *google.NEWER, Entry(('position/embedding',), 'pos_embedding'),
    Entry(('pool/probe',), 'MAPHead_0/probe'),
    *google.attention_entries('pool/attention', 'MAPHead_0/MultiHeadDotProductAttention_0'),
    *same('pool/norm', 'MAPHead_0/LayerNorm_0', 'scale bias'),
    *google.mlp_entries('pool/mlp', 'MAPHead_0/MlpBlock_0')]


def table(model: dict) -> list[Entry]:
    """What an array is called."""
    return _TABLE


def prepare(arrays: dict, sidecars: dict) -> tuple[dict, list[Entry]]:
    """The arrays with blocks of their own and a position embedding of the class token."""
    single = {}
    for name, x in arrays.items():
        if name.startswith(_STACKED) and x.ndim:
            single |= {f'Transformer/encoderblock_{i}/{name.removeprefix(_STACKED)}': x[i]
                       for i in range(len(x))}
        elif name == 'pos_embedding' and 'cls' in arrays and x.ndim == 3:
            single[name] = np.pad(x, ((0, 0), (1, 0), (0, 0)))
        else:
            single[name] = x
    return single, _TABLE


def known(arrays: dict, sidecars: dict) -> tuple[dict, list | None, dict | None]:
    """What big_vision computes; the arrays come alone."""
    position = {} if 'pos_embedding' in arrays else {'position': 'sincos_2d'}
    return google.FIELDS | position, None, None


def holds(model: dict, path: str) -> dict[str, tuple]:
    """Values of fields that the layout can hold."""
    fields = google.FIELDS | dict(layer_scale_init=0.0, resnet=None)
    return dict(position=('learned_1d', 'sincos_2d'), pool=('cls', 'gap', 'map'),
                **{name: (value,) for name, value in fields.items()})


def finish(arrays: dict, weights) -> tuple[dict, dict]:
    """The arrays with the position of the class token added to it; no JSON files."""
    if 'cls' in arrays and 'pos_embedding' in arrays:
        position = arrays['pos_embedding']
        arrays = arrays | {'cls': arrays['cls'] + position[:, :1],
                           'pos_embedding': position[:, 1:]}
    return arrays, {}
