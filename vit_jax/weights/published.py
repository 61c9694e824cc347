"""How released models prepare images and which GELU they have, where files do not state it.

The numbers are from the pretrained_cfg of timm 1.0.31 (tests/weights/published_test.py compares
them) for the models of timm that vit_jax reads. CLIP's models are left out, and of the models with
registers all except DINOv2's. Several families may have the same arrays, such as AugReg and DeiT.
Then the name of the file decides if it is typical of one family; otherwise no family is chosen.
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
# Names of sizes that are not in models/variants.py, by hidden_size, num_layers and mlp_dim.
_FURTHER = {(512, 12, 2048): 'm', (1536, 40, 6144): 'gopt'}
# Names of the models whose GELU is tanh.
TANH_MODELS = r'(patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip_(gap_)?512'
# Sizes of the models whose GELU is tanh: (hidden_size, patch) -> number of patches, 0 for any
# number. None of these models has a class token.
TANH_SIZES = {(768, 32): 0, (1024, 16): 1024, (1152, 16): 0, (1536, 16): 0}
# CLIP's models, with their tags, that were trained with QuickGELU although their names mean GELU.
_QUICK_GELU = (
    r'_clip_(224|336|378)\.(openai|metaclip_400m|metaclip_2pt5b|dfn5b)$|'
    r'(large_patch14_clip_224\.dfn2b|huge_patch14_clip_224\.metaclip2_worldwide|'
    r'patch32_clip_224\.laion400m_e32)$'
)
# Names of files that say nothing about the model, so that the name of the directory is used.
_NO_NAME = r'(pytorch_)?model\.'
# Names of MAE's files, and of the files of timm's first models.
_MAE = r'.*(?<![a-z])mae(?![a-z])'
_FIRST = (
    rf'(?!.*(deit|dino|bamboo|miil)|{_MAE}).*'
    r'(augreg|orig_in21k|(?<![a-z])vit_(tiny|small|base|large|huge)_)'
)


class Family(NamedTuple):
    """Published models that prepare images in the same way.

    Attributes:
      name: the name of the family in messages.
      models: names of models as in models/variants.py.
      image_sizes: possible sides of the images, in pixels.
      classes: possible numbers of classes.
      crop_ratio: see config.preprocess.
      normalise: mean and std of config.preprocess.
      kind: how tokens are pooled; 'scale' for a class token and LayerScale; 'bit' for a ResNet.
      file_names: regular expression for the beginning of the names of its files; '' if they are not
        typical.
      resize: see config.preprocess.
      fit: see config.preprocess.
    """

    name: str
    models: str
    image_sizes: tuple[int, ...]
    classes: tuple[int, ...]
    crop_ratio: float
    normalise: Mapping
    kind: str = 'cls'
    file_names: str = ''
    resize: str = 'bicubic'
    fit: str = 'torchvision'

    def preprocess(self) -> dict:
        """The fields of config.preprocess; also the image_size of a ResNet."""
        fields = dict(
            fit=self.fit,
            crop_ratio=self.crop_ratio,
            resize=self.resize,
            antialias=True,
            uint8_resize=True,
            **self.normalise,
        )
        if self.kind == 'bit':
            (side,) = self.image_sizes
            fields['image_size'] = (side, side)
        return fields


_K1 = (1000,)
_K21 = (1000, 21843)
_NONE = (0,)
_AUGREG_224 = 'ti16 s16 s32 b8 b16 b32 l16 r_ti16 r26_s32 r50_l32'
_AUGREG_384 = 'ti16 s16 s32 b16 b32 l16 l32 r_ti16 r26_s32 r50_l32 r50_b16'
_DEIT3 = 's16 m16 b16 l16 h14'
_BITS = 'r50x1 r50x3 r101x1 r101x3 r152x2'
_BIT_IN1K = r'.*(in21k_ft|ilsvrc2012)(?!.*teacher)'


def _siglip(kind):
    """SigLIP's families with a pooling head ('map'), or with the mean of the tokens ('gap')."""
    return [
        Family('SigLIP', 'b16 l16', (224, 256, 384, 512), _NONE, 0.9, _HALF, kind),
        Family('SigLIP', 'so400m16', (256, 384, 512), _NONE, 0.9, _HALF, kind),
        Family('SigLIP', 'b32 gopt16', (256, 384), _NONE, 0.9, _HALF, kind),
        Family('SigLIP', 'so400m14', (224, 378), _NONE, 0.9, _HALF, kind),
        Family('SigLIP, in1k', 'so400m14', (378,), _K1, 1.0, _HALF, kind, fit='squash'),
    ]


FAMILIES = [
    Family('AugReg', _AUGREG_224, (224,), _K21, 0.9, _HALF, file_names=_FIRST),
    Family('AugReg', _AUGREG_384, (384,), _K1, 1.0, _HALF, file_names=_FIRST),
    Family(
        'ViT, in21k', 'b16 b32 l16 l32 h14 r50_b16', (224,), _NONE, 0.9, _HALF, file_names=_FIRST
    ),
    Family('DeiT', 'ti16 s16 b16', (224,), _K1, 0.9, _IMAGENET, file_names=r'.*deit'),
    Family('DeiT', 'b16', (384,), _K1, 1.0, _IMAGENET, file_names=r'.*deit'),
    Family('DINO', 's8 s16 b8 b16', (224,), _NONE, 0.9, _IMAGENET, file_names=r'.*dino'),
    Family('MAE', 'b16 l16 h14', (224,), _NONE, 0.9, _IMAGENET, file_names=_MAE),
    Family('Bamboo', 'b16', (224,), (115217,), 1.0, _CLIP),
    Family('FlexiViT', 's16 b16 l16', (240,), _K21, 0.95, _HALF),
    Family('DeiT III', _DEIT3, (224,), _K1, 0.9, _IMAGENET, 'scale', r'(?!.*2[12]k).*1k'),
    Family('DeiT III, in21k', _DEIT3, (224,), _K1, 1.0, _IMAGENET, 'scale', r'.*2[12]k'),
    Family('DeiT III', 's16 b16 l16', (384,), _K1, 1.0, _IMAGENET, 'scale'),
    Family('DINOv2', 's14 b14 l14', (518,), _NONE, 1.0, _IMAGENET, 'scale'),
    Family('I-JEPA', 'h14 g16', (224,), _NONE, 0.9, _IMAGENET, 'gap'),
    Family('I-JEPA', 'h16', (448,), _NONE, 1.0, _IMAGENET, 'gap'),
    *_siglip('map'),
    *_siglip('gap'),
    Family('SigLIP and PaliGemma', 'so400m14', (378, 448, 896), _NONE, 1.0, _HALF, 'gap'),
    Family('BiT', f'{_BITS} r152x4', (224,), (21843,), 0.875, _HALF, 'bit', resize='bilinear'),
    Family('BiT', _BITS, (448,), _K1, 1.0, _HALF, 'bit', _BIT_IN1K, resize='bilinear'),
    Family('BiT', 'r152x4', (480,), _K1, 1.0, _HALF, 'bit', resize='bilinear'),
    Family('BiT, distilled', 'r50x1', (224,), _K1, 0.875, _HALF, 'bit', r'.*distil'),
    Family('BiT, teacher', 'r152x2', (224,), _K1, 0.875, _HALF, 'bit', r'.*teacher(?!.*384)'),
    Family('BiT, teacher', 'r152x2', (384,), _K1, 1.0, _HALF, 'bit', r'.*teacher.*384'),
]


def is_tanh(hidden_size: tuple, patch: tuple, patches: tuple) -> bool:
    """Whether timm's models of these sizes without a class token are SigLIP 2's, with GELU by tanh.

    Each size is a tuple from the shape of an array: () if the array is missing.
    """
    number = TANH_SIZES.get((*hidden_size, *patch[:1]))
    return number is not None and (not number or patches == (number,))


def doubt_of_gelu(name: str) -> str:
    """A warning if ARCHITECTURE.TAG was trained with another GELU than timm states, or ''.

    The warning continues a sentence that begins with the source.
    """
    if not re.search(_QUICK_GELU, name):
        return ''
    return (
        'was trained with QuickGELU, but its name means GELU, in timm and here: add --model '
        'gelu=quick; for training, to vit_jax.convert.'
    )


def candidates(weights: Weights) -> list[Family]:
    """The families that have a model with such arrays."""
    model = weights.model
    kind = _kind(model)
    name = _name(model)
    return [
        family
        for family in FAMILIES
        if family.kind == kind
        and name in family.models.split()
        and weights.num_classes in family.classes
        and (kind == 'bit' or weights.grid() in _grids(family, model))
    ]


def _kind(model):
    """The `kind` of the families that may have the model; '' if no family in FAMILIES can."""
    if model.get('stem_norm') or model.get('norm_after_pool'):
        return ''
    if model.get('layer_scale_init'):
        return 'scale'
    return model.get('pool', 'bit')


def _grids(family, model):
    patch = model_lib.patch_in_pixels(model)[0]
    return [(size // patch, size // patch) for size in family.image_sizes]


def choose(weights: Weights) -> tuple[str, dict] | None:
    """The reason for the choice of a family, and its `preprocess`; None if no family is certain."""
    families = candidates(weights)
    evidence = 'arrays'
    if _differ(families):
        name = _file_name(weights.source)
        families = [
            family for family in families if family.file_names and re.match(family.file_names, name)
        ]
        evidence = 'arrays and name'
    if not families or _differ(families):
        return None
    family = families[0]
    return f'its {evidence} are those of {family.name} in timm', family.preprocess()


def _file_name(source):
    """The name of the file in lower case, with its directory if the name alone says nothing."""
    *_, directory, name = ('/' + source.lower().replace(':', '/')).split('/')
    if re.match(_NO_NAME, name):
        return f'{directory}/{name}'
    return name


def _differ(families):
    return any(family.preprocess() != families[0].preprocess() for family in families)


def hint(weights: Weights) -> str:
    """The part of a message that lists the options of published models with such arrays, or ''."""
    lines: dict[str, None] = {}  # each line once, in order
    for family in candidates(weights):
        size = f' of {family.image_sizes[0]} px' if family.kind == 'bit' else ''
        lines[f'\n  {family.name}{size}: --preprocess {words(family.preprocess())}'] = None
    if not lines:
        return ''
    return ' Published models with such arrays need' + ''.join(lines)


def words(preprocess: Mapping) -> str:
    """The value of the option --preprocess for `preprocess`, without image_size."""
    assignments = []
    for name, x in preprocess.items():
        if name != 'image_size':
            numbers = x if isinstance(x, tuple) else (x,)
            assignments.append(f'{name}={",".join(map(str, numbers))}')
    return ','.join(assignments)


def _name(model):
    """The name of a model as in models/variants.py, or as in _FURTHER."""
    if 'hidden_size' not in model:
        return f'r{3 * sum(model["resnet"]["units"]) + 2}x{model["resnet"]["width"] // 64}'
    size = _FURTHER.get(model_lib.sizes(model))
    if size:
        return f'{size}{model["patch_size"][0]}'
    return variants.name_of(model)
