"""How released models prepare images and which GELU they have, where files do not say it.

From the pretrained_cfg of timm 1.0.31 (tests/weights/published_test.py compares), for those of its
models that can be read here, but for CLIP's, and of those with registers for DINOv2's only. Several
may have the same arrays, as those of AugReg and DeiT: then the name of the file decides, if it has
theirs, and otherwise nothing does.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from vit_jax.models import variants
from vit_jax.weights import model as model_lib
from vit_jax.weights.model import Weights

_HALF = dict(mean=(0.5,) * 3, std=(0.5,) * 3)
_IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_CLIP = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
# Sizes that models/variants.py does not have, by hidden_size, num_layers and mlp_dim.
_FURTHER = {(512, 12, 2048): 'm', (1536, 40, 6144): 'gopt'}
# Models whose GELU is tanh, by name.
TANH_MODELS = r'(patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip_(gap_)?512'
# The same by what arrays show: (hidden_size, patch) -> number of patches, 0 for any; none of these
# has a class token.
TANH_SIZES = {(768, 32): 0, (1024, 16): 1024, (1152, 16): 0, (1536, 16): 0}
# CLIP's that were trained with QuickGELU, under names, with a tag, of models with GELU.
_QUICK_GELU = (
    r'_clip_(224|336|378)\.(openai|metaclip_400m|metaclip_2pt5b|dfn5b)$|'
    r'(large_patch14_clip_224\.dfn2b|huge_patch14_clip_224\.metaclip2_worldwide|'
    r'patch32_clip_224\.laion400m_e32)$'
)
# Names of files: that of a file which its directory names, of MAE's, and of timm's first models.
_NO_NAME = r'(pytorch_)?model\.'
_MAE = r'.*(?<![a-z])mae(?![a-z])'
_FIRST = (
    rf'(?!.*(deit|dino|bamboo|miil)|{_MAE}).*'
    r'(augreg|orig_in21k|(?<![a-z])vit_(tiny|small|base|large|huge)_)'
)


class Family(NamedTuple):
    """Models that are published with one way to prepare images."""

    name: str  # as it is known
    file_names: str  # regular expression that matches those of its files; '' if none is sure
    models: str  # names as in models/variants.py
    image_sizes: tuple[int, ...]
    classes: tuple[int, ...]
    kind: str  # how tokens are pooled; 'scale': class token and LayerScale; 'bit'
    crop_ratio: float
    normalise: Mapping
    resize: str = 'bicubic'
    fit: str = 'torchvision'

    def preprocess(self) -> dict:
        """Fields of config.preprocess; also image_size of a ResNet, whose arrays do not show it."""
        return dict(
            fit=self.fit,
            crop_ratio=self.crop_ratio,
            resize=self.resize,
            antialias=True,
            uint8_resize=True,
            **self.normalise,
        ) | ({'image_size': self.image_sizes * 2} if self.kind == 'bit' else {})


_K1, _K21, _NONE = (1000,), (1000, 21843), (0,)
_BITS = 'r50x1 r50x3 r101x1 r101x3 r152x2'
FAMILIES = [
    Family(*row)
    for row in (
        (
            'AugReg',
            _FIRST,
            'ti16 s16 s32 b8 b16 b32 l16 r_ti16 r26_s32 r50_l32',
            (224,),
            _K21,
            'cls',
            0.9,
            _HALF,
        ),
        (
            'AugReg',
            _FIRST,
            'ti16 s16 s32 b16 b32 l16 l32 r_ti16 r26_s32 r50_l32 r50_b16',
            (384,),
            _K1,
            'cls',
            1.0,
            _HALF,
        ),
        ('ViT, in21k', _FIRST, 'b16 b32 l16 l32 h14 r50_b16', (224,), _NONE, 'cls', 0.9, _HALF),
        ('DeiT', r'.*deit', 'ti16 s16 b16', (224,), _K1, 'cls', 0.9, _IMAGENET),
        ('DeiT', r'.*deit', 'b16', (384,), _K1, 'cls', 1.0, _IMAGENET),
        ('DINO', r'.*dino', 's8 s16 b8 b16', (224,), _NONE, 'cls', 0.9, _IMAGENET),
        ('MAE', _MAE, 'b16 l16 h14', (224,), _NONE, 'cls', 0.9, _IMAGENET),
        ('Bamboo', '', 'b16', (224,), (115217,), 'cls', 1.0, _CLIP),
        ('FlexiViT', '', 's16 b16 l16', (240,), _K21, 'cls', 0.95, _HALF),
        (
            'DeiT III',
            r'(?!.*2[12]k).*1k',
            's16 m16 b16 l16 h14',
            (224,),
            _K1,
            'scale',
            0.9,
            _IMAGENET,
        ),
        (
            'DeiT III, in21k',
            r'.*2[12]k',
            's16 m16 b16 l16 h14',
            (224,),
            _K1,
            'scale',
            1.0,
            _IMAGENET,
        ),
        ('DeiT III', '', 's16 b16 l16', (384,), _K1, 'scale', 1.0, _IMAGENET),
        ('DINOv2', '', 's14 b14 l14', (518,), _NONE, 'scale', 1.0, _IMAGENET),
        ('I-JEPA', '', 'h14 g16', (224,), _NONE, 'gap', 0.9, _IMAGENET),
        ('I-JEPA', '', 'h16', (448,), _NONE, 'gap', 1.0, _IMAGENET),
        *(
            row
            for kind in ('map', 'gap')
            for row in (
                ('SigLIP', '', 'b16 l16', (224, 256, 384, 512), _NONE, kind, 0.9, _HALF),
                ('SigLIP', '', 'so400m16', (256, 384, 512), _NONE, kind, 0.9, _HALF),
                ('SigLIP', '', 'b32 gopt16', (256, 384), _NONE, kind, 0.9, _HALF),
                ('SigLIP', '', 'so400m14', (224, 378), _NONE, kind, 0.9, _HALF),
                (
                    'SigLIP, in1k',
                    '',
                    'so400m14',
                    (378,),
                    _K1,
                    kind,
                    1.0,
                    _HALF,
                    'bicubic',
                    'squash',
                ),
            )
        ),
        ('SigLIP and PaliGemma', '', 'so400m14', (378, 448, 896), _NONE, 'gap', 1.0, _HALF),
        ('BiT', '', f'{_BITS} r152x4', (224,), (21843,), 'bit', 0.875, _HALF, 'bilinear'),
        (
            'BiT',
            r'.*(in21k_ft|ilsvrc2012)(?!.*teacher)',
            _BITS,
            (448,),
            _K1,
            'bit',
            1.0,
            _HALF,
            'bilinear',
        ),
        ('BiT', '', 'r152x4', (480,), _K1, 'bit', 1.0, _HALF, 'bilinear'),
        ('BiT, distilled', r'.*distil', 'r50x1', (224,), _K1, 'bit', 0.875, _HALF),
        ('BiT, teacher', r'.*teacher(?!.*384)', 'r152x2', (224,), _K1, 'bit', 0.875, _HALF),
        ('BiT, teacher', r'.*teacher.*384', 'r152x2', (384,), _K1, 'bit', 1.0, _HALF),
    )
]


def is_tanh(hidden_size: tuple, patch: tuple, patches: tuple) -> bool:
    """Whether timm's models of these sizes, each a tuple, without class token are SigLIP 2's."""
    number = TANH_SIZES.get((*hidden_size, *patch[:1]))
    return number is not None and (not number or patches == (number,))


def doubt_of_gelu(name: str) -> str:
    """For a warning, if timm's ARCHITECTURE.TAG was trained with another GELU than it names."""
    return (
        'was trained with QuickGELU, and has GELU by its name, in timm as here: add --model '
        'gelu=quick; for training, to vit_jax.convert.'
        if re.search(_QUICK_GELU, name)
        else ''
    )


def candidates(weights: Weights) -> list[Family]:
    """The families that have a model with such arrays."""
    model, grid = weights.model, weights.grid()
    kind = (
        'none of them'
        if model.get('stem_norm') or model.get('norm_after_pool')
        else 'scale'
        if model.get('layer_scale_init')
        else model.get('pool', 'bit')
    )
    patch = None if kind == 'bit' else model_lib.patch_in_pixels(model)[0]
    return [
        family
        for family in FAMILIES
        if _name(model) in family.models.split()
        and family.kind == kind
        and weights.num_classes in family.classes
        and (not patch or grid in [(size // patch,) * 2 for size in family.image_sizes])
    ]


def choose(weights: Weights) -> tuple[str, dict] | None:
    """What shows whose weights these are, and their `preprocess`; None unless that is sure."""
    found, shown = candidates(weights), 'arrays'
    if _differ(found):
        *_, directory, name = ('/' + weights.source.lower().replace(':', '/')).split('/')
        name = f'{directory}/{name}' if re.match(_NO_NAME, name) else name
        found = [
            family for family in found if family.file_names and re.match(family.file_names, name)
        ]
        shown = 'arrays and name'
    if not found or _differ(found):
        return None
    return f'its {shown} are those of {found[0].name} in timm', found[0].preprocess()


def _differ(families):
    return any(family.preprocess() != families[0].preprocess() for family in families)


def hint(weights: Weights) -> str:
    """What the published models with such arrays need, for a message; '' if there are none."""
    lines = dict.fromkeys(
        f'\n  {family.name}{f" of {family.image_sizes[0]} px" * (family.kind == "bit")}: '
        f'--preprocess {words(family.preprocess())}'
        for family in candidates(weights)
    )
    return ' Published models with such arrays need' + ''.join(lines) if lines else ''


def words(preprocess: Mapping) -> str:
    """`preprocess` as the option of that name takes it, without image_size."""
    return ','.join(
        f'{name}={",".join(map(str, x)) if isinstance(x, tuple) else x}'
        for name, x in preprocess.items()
        if name != 'image_size'
    )


def _name(model):
    """As in models/variants.py, which does not have all sizes."""
    if 'hidden_size' not in model:
        return f'r{3 * sum(model["resnet"]["units"]) + 2}x{model["resnet"]["width"] // 64}'
    size = _FURTHER.get(model_lib.sizes(model))
    return f'{size}{model["patch_size"][0]}' if size else variants.name_of(model)
