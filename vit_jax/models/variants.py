"""The table of models: the fields of a model config for names such as 'b16'.

Sources of the sizes:

- Ti and S: arXiv 2012.12877 and 2106.10270.
- B, L and H: ViT (arXiv 2010.11929), table 1.
- g and G: Scaling Vision Transformers (arXiv 2106.04560), table 2.
- So400m: arXiv 2305.13035.
- Hybrids and ResNets: ViT section 4.1 and table 6; R+Ti/16 and R26+S/32 arXiv 2106.10270; the units
  of each ResNet BiT (arXiv 1912.11370).
- Axial models: ViT appendix D.6. The paper does not state the width of AxialResNet-50. The table
  has the width of axial50s in github.com/csrhddlam/axial-deeplab, the model that its commands
  train. axial50l has twice the width, resnet.width=64.
"""

import itertools
import re
from collections.abc import Mapping

from vit_jax.errors import UserError, nearest_names

#            hidden_size, num_layers, mlp_dim, num_heads
SIZES = {
    'ti': (192, 12, 768, 3),
    's': (384, 12, 1536, 6),
    'b': (768, 12, 3072, 12),
    'l': (1024, 24, 4096, 16),
    'h': (1280, 32, 5120, 16),
    'g': (1408, 40, 6144, 16),
    'G': (1664, 48, 8192, 16),
    'so400m': (1152, 27, 4304, 16),
}
PATCHES = (4, 8, 14, 16, 32)
TRANSFORMERS = {
    f'{size}{patch}': (size, patch) for size, patch in itertools.product(SIZES, PATCHES)
}

# Hybrids: units of the ResNet's stages, size of the transformer, patch size on the feature map.
# The number in the name is the total down-sampling; models with 16 have the units of stage 4 in
# stage 3. R+Ti/16 is an exception: its down-sampling is 32, because Google's configs/models.py
# counts 2 for the root, whose convolution and max-pool make 4.
HYBRIDS = {
    'r_ti16': ((), 'ti', 8),
    'r26_s32': ((2, 2, 2, 2), 's', 1),
    'r50_b16': ((3, 4, 9), 'b', 1),
    'r50_b32': ((3, 4, 6, 3), 'b', 1),
    'r50_l16': ((3, 4, 9), 'l', 1),
    'r50_l32': ((3, 4, 6, 3), 'l', 1),
}
#           units of each stage, width factor
RESNETS = {
    'r50x1': ((3, 4, 6, 3), 1),
    'r50x2': ((3, 4, 6, 3), 2),
    'r101x1': ((3, 4, 23, 3), 1),
    'r152x1': ((3, 8, 36, 3), 1),
    'r152x2': ((3, 8, 36, 3), 2),
    'r152x4': ((3, 8, 36, 3), 4),
    'r200x3': ((3, 24, 36, 3), 3),
}
# Words for sizes in names such as timm's vit_tiny_patch16_224, Hugging Face's vit-base-patch16-224.
_SIZE_WORDS = {
    'tiny': 'ti',
    'small': 's',
    'base': 'b',
    'large': 'l',
    'huge': 'h',
    'giant': 'g',
    'gigantic': 'G',
    'so400m': 'so400m',
}
# Patch sizes of names without one; all other sizes have 16.
_USUAL_PATCHES = {'h': 14, 'g': 14, 'G': 14, 'so400m': 14}
AXIAL = {'axial_b16': 'b16', 'axial_b32': 'b32'}
#           units of each stage, width, heads
AXIAL_RESNETS = {'axial_r50': ((3, 4, 6, 3), 32, 8)}


def names() -> list[str]:
    """Returns all model names: 'ti4', ..., 'so400m32', then axial ViTs, hybrids and ResNets."""
    return [*TRANSFORMERS, *AXIAL, *HYBRIDS, *RESNETS, *AXIAL_RESNETS]


def get(name: str) -> dict:
    """Returns the fields of vit.ViT, or of resnet.ResNet for RESNETS, that differ from defaults.

    Args:
      name: a size and a patch size in pixels, such as 'b16' ('g14' and 'G14' are two models), or a
        key of AXIAL, HYBRIDS, RESNETS or AXIAL_RESNETS.

    Raises:
      UserError: there is no model of the name. The message proposes the nearest names.
    """
    if name in TRANSFORMERS:
        return _transformer(*TRANSFORMERS[name])
    if name in AXIAL:
        return {**get(AXIAL[name]), 'attention': 'axial', 'pool': 'gap'}
    if name in HYBRIDS:
        units, size, patch = HYBRIDS[name]
        return {**_transformer(size, patch), 'resnet': hybrid_resnet(units)}
    if name in RESNETS:
        units, factor = RESNETS[name]
        return {'resnet': bit_resnet(units, 64 * factor)}
    if name in AXIAL_RESNETS:
        units, width, heads = AXIAL_RESNETS[name]
        return {'resnet': axial_resnet(units, width), 'axial_heads': heads}
    our_name = _translated(str(name))
    hint = nearest_names(name, names())
    if our_name is not None:
        hint = f'Here its name is {our_name}. '
    raise UserError(
        f'unknown model {name!r}. {hint}A name is a size of {", ".join(SIZES)} '
        f'and a patch size of {", ".join(map(str, PATCHES))}, as in b16, or one '
        f'of {", ".join([*AXIAL, *HYBRIDS, *RESNETS, *AXIAL_RESNETS])}.',
        kind='unknown',
        field='model',
        value=name,
    )


def _translated(name):
    """Translates another project's name of a plain ViT, such as vit_tiny or ViT-B/16, to ours."""
    word = re.compile(rf'(?<![a-z])({"|".join(_SIZE_WORDS)})(?![a-z])(.*)')
    letter = re.compile(rf'(?i:vit)[-_ ]?({"|".join(SIZES)})(?![a-z])(.*)')
    lower = name.lower()
    # The unchanged name first, because g and G are two sizes.
    match = word.search(lower) or letter.match(name) or letter.match(lower)
    if match is None:
        return None
    size = _SIZE_WORDS.get(match[1], match[1])
    rest = match[2]
    is_hybrid = re.search(r'r\d+', rest)  # vit_base_r50_s16
    if is_hybrid:
        return None
    patch = _USUAL_PATCHES.get(size, 16)
    patch_match = re.match(r'[-_/ ]?(?:patch|p)?(\d+)', rest) or re.search(r'patch(\d+)', rest)
    if patch_match is not None:
        patch = patch_match[1]
    our_name = f'{size}{patch}'
    if our_name not in TRANSFORMERS:
        return None
    return our_name


def name_of(model: Mapping) -> str | None:
    """Returns the name of the model with the same sizes, or None; other fields may differ."""
    sizes = _sizes(model)
    for name in names():
        if _sizes(get(name)) == sizes:
            return name
    return None


def _sizes(fields):
    resnet = fields.get('resnet') or {}
    patch = fields.get('patch_size', ())
    patch = (patch, patch) if isinstance(patch, int) else tuple(patch)
    return (
        *(fields.get(name) for name in ('hidden_size', 'num_layers', 'mlp_dim')),
        patch,
        fields.get('attention', 'full'),
        tuple(resnet.get('units', ())),
        resnet.get('width'),
        fields.get('axial_heads', 0),
    )


def hybrid_resnet(units: tuple[int, ...], width: int = 64) -> dict:
    """Returns the fields of resnet.Backbone for a hybrid, with the numbers of Google's code."""
    # timm has a group_norm_epsilon of 1e-5, and adds 1e-8 to the variance of kernels.
    return dict(
        units=units,
        width=width,
        preactivation=False,
        fixed_padding=False,
        num_groups=32,
        group_norm_epsilon=1e-6,
        weight_epsilon=1e-5,
        weight_epsilon_on='std',
    )


def bit_resnet(units: tuple[int, ...], width: int = 64) -> dict:
    """Returns the fields of resnet.Backbone for the baseline, with the numbers of BiT."""
    # timm has a weight_epsilon of 1e-8.
    return dict(
        units=units,
        width=width,
        preactivation=True,
        fixed_padding=True,
        num_groups=32,
        group_norm_epsilon=1e-5,
        weight_epsilon=1e-10,
        weight_epsilon_on='variance',
    )


def axial_resnet(units: tuple[int, ...], width: int) -> dict:
    """Returns the fields of resnet.Backbone for AxialResNet; its norms follow convolutions."""
    return bit_resnet(units, width) | dict(preactivation=False)


def _transformer(size, patch):
    hidden_size, num_layers, mlp_dim, num_heads = SIZES[size]
    return dict(
        patch_size=(patch, patch),
        hidden_size=hidden_size,
        num_layers=num_layers,
        mlp_dim=mlp_dim,
        num_heads=num_heads,
    )
