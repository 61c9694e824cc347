"""One module for each layout of weights.

In: the arrays and JSON objects of a file. Out: a Layout for each program, which interprets them.
Imports the same packages as weights.

A new layout is one module that defines a Layout, and one line in LAYOUTS. The table of a layout
lists {our name: their name} by block, for example:

    _TABLE = [
        *entries({'cls': 'class_token'}),
        *torch_modules({'embedding': 'patch.proj', 'norm': 'norm', 'head': 'head'}),
        *torch_modules(
            {'norm1': 'ln1', 'attention/query key value': 'attn.qkv', ...},
            within=('blocks/{i}/', 'layers.{i}.'),
        ),
    ]
"""

import re
from collections.abc import Collection

from vit_jax.errors import UserError
from vit_jax.weights.layout import Layout
from vit_jax.weights.layouts import big_vision, google, huggingface, own, timm, torchvision

# `detect` tries the layouts in this order.
LAYOUTS: dict[str, Layout] = {
    'vit_jax': own.LAYOUT,
    'google': google.LAYOUT,
    'big_vision': big_vision.LAYOUT,
    'timm': timm.LAYOUT,
    'huggingface': huggingface.LAYOUT,
    'torchvision': torchvision.LAYOUT,
}


def detect(names: Collection[str], source: str) -> str:
    """The key of LAYOUTS that has arrays of such names; UserError if none has."""
    for key, layout in LAYOUTS.items():
        if any(re.fullmatch(layout.mark, name) for name in names):
            return key
    raise UserError(
        f'{source} is of an unknown layout. It has {len(names)} arrays, among them '
        f'{", ".join(list(names)[:6])}. Expected one of {", ".join(LAYOUTS)}, recognised by names '
        'such as Transformer/encoderblock_0/LayerNorm_0/scale, patch_embed.proj.weight, '
        'vit.embeddings.patch_embeddings.projection.weight or conv_proj.weight.',
        kind='content',
        file=source,
    )
