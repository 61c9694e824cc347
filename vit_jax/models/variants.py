"""The one table of models: names such as 'b16' become the numbers of a model config.

Sizes: Ti and S from arXiv 2012.12877 and 2106.10270, B, L and H from ViT (arXiv 2010.11929)
table 1, g and G from Scaling (arXiv 2106.04560) table 2, So400m from arXiv 2305.13035. Hybrids and
ResNets: ViT section 4.1 and table 6, R+Ti/16 and R26+S/32 from arXiv 2106.10270, units of each
ResNet from BiT (arXiv 1912.11370). Axial models: ViT appendix D.6, which does not state the width
of AxialResNet-50: it is that of axial50s in github.com/csrhddlam/axial-deeplab, the one that its
commands train; axial50l has twice the width, resnet.width=64.
"""

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
TRANSFORMERS = {f'{size}{patch}': (size, patch) for size in SIZES for patch in PATCHES}

# Hybrids: units of the ResNet's stages, size of the transformer, its patch on the feature map.
# The number in the name is the total down-sampling; /16 puts the units of stage 4 into stage 3. But
# R+Ti/16 has 32: Google's configs/models.py counts 2 for the root, whose convolution and max-pool
# make 4.
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
# In names such as timm's vit_tiny_patch16_224, Hugging Face's vit-base-patch16-224 and ViT-B/16.
_ELSEWHERE = {
    'tiny': 'ti',
    'small': 's',
    'base': 'b',
    'large': 'l',
    'huge': 'h',
    'giant': 'g',
    'gigantic': 'G',
    'so400m': 'so400m',
}
_USUAL_PATCHES = {'h': 14, 'g': 14, 'G': 14, 'so400m': 14}  # of names that say none; else 16
AXIAL = {'axial_b16': 'b16', 'axial_b32': 'b32'}
#           units of each stage, width, heads
AXIAL_RESNETS = {'axial_r50': ((3, 4, 6, 3), 32, 8)}


def names() -> list[str]:
    """All model names: 'ti4', ..., 'so400m32', then axial ViTs, hybrids and ResNets."""
    return [*TRANSFORMERS, *AXIAL, *HYBRIDS, *RESNETS, *AXIAL_RESNETS]


def get(name: str) -> dict:
    """Fields of vit.ViT, or of resnet.ResNet for RESNETS; what is left out has its default there.

    A name is a size and a patch size in pixels, for example 'b16' ('g14' and 'G14' are two models),
    or a key of one of the following tables. Raises UserError, with the nearest names, for others.
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
    ours = _named_elsewhere(str(name))
    nearest = f'Here it is {ours}. ' if ours else nearest_names(name, names())
    raise UserError(
        f'unknown model {name!r}. {nearest}A name is a size of {", ".join(SIZES)} '
        f'and a patch size of {", ".join(map(str, PATCHES))}, as in b16, or one '
        f'of {", ".join([*AXIAL, *HYBRIDS, *RESNETS, *AXIAL_RESNETS])}.'
    )


def _named_elsewhere(name):
    """Our name of a plain transformer that other code calls vit_tiny, deit-small or ViT-B/16."""
    word = re.compile(rf'(?<![a-z])({"|".join(_ELSEWHERE)})(?![a-z])(.*)')
    letter = re.compile(rf'(?i:vit)[-_ ]?({"|".join(SIZES)})(?![a-z])(.*)')
    lower = name.lower()
    # With its own case first, because g and G are two sizes.
    match = word.search(lower) or letter.match(name) or letter.match(lower)
    if match is None or re.search(r'r\d+', match[2]):  # a hybrid, as vit_base_r50_s16
        return None
    size = _ELSEWHERE.get(match[1], match[1])
    rest = match[2]
    patch = re.match(r'[-_/ ]?(?:patch|p)?(\d+)', rest) or re.search(r'patch(\d+)', rest)
    ours = f'{size}{patch[1] if patch else _USUAL_PATCHES.get(size, 16)}'
    return ours if ours in TRANSFORMERS else None


def name_of(model: Mapping) -> str | None:
    """The name of the model with such sizes, whatever its other fields; None if none has them."""
    return next((name for name in names() if _sizes(get(name)) == _sizes(model)), None)


def _sizes(fields):
    resnet, patch = fields.get('resnet') or {}, fields.get('patch_size', ())
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
    """Fields of resnet.Backbone for a hybrid, as in Google's code."""
    # In timm the epsilons are 1e-5 and, on the variance, 1e-8.
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
    """Fields of resnet.Backbone for the baseline, as in BiT; timm has 1e-8 on the variance."""
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
    """Fields of resnet.Backbone for AxialResNet, whose norms stand after convolutions."""
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
