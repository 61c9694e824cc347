"""timm's VisionTransformer, hybrid or not, and ResNetV2 (BiT): .safetensors, .pth or a directory.

A directory has a config.json like timm's models on the Hugging Face hub; timm.create_model opens it
as 'local-dir:DIR'. A file can store only models that timm builds without further arguments.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from vit_jax.errors import UserError, check_choice
from vit_jax.models.vit import as_pair
from vit_jax.weights import description, published, sidecars
from vit_jax.weights.array_files import is_directory
from vit_jax.weights.layout import PLAIN, Layout, Reading, only
from vit_jax.weights.model import Weights, guess_heads, num_prefix_tokens
from vit_jax.weights.sidecars import Deviations, Layers, Means, Ratio, Sides, Size
from vit_jax.weights.table import entries, torch_modules

# GroupNorm and StdConv2d of timm's hybrids and BiT models.
_RESNET = dict(group_norm_epsilon=1e-5, weight_epsilon=1e-8, weight_epsilon_on='variance')
_SIZES = {'embed_dim': 'hidden_size', 'depth': 'num_layers', 'num_heads': 'num_heads'}
# Names by hidden_size and patch_size. Arguments describe all other differences between models.
_NAMES = {
    (192, (16, 16)): 'vit_tiny_patch16_224',
    (384, (8, 8)): 'vit_small_patch8_224',
    (384, (16, 16)): 'vit_small_patch16_224',
    (384, (32, 32)): 'vit_small_patch32_224',
    (768, (8, 8)): 'vit_base_patch8_224',
    (768, (16, 16)): 'vit_base_patch16_224',
    (768, (32, 32)): 'vit_base_patch32_224',
    (1024, (14, 14)): 'vit_large_patch14_224',
    (1024, (16, 16)): 'vit_large_patch16_224',
    (1024, (32, 32)): 'vit_large_patch32_224',
    (1280, (14, 14)): 'vit_huge_patch14_224',
}
# Number of heads of models for which guess_heads returns another number.
_HEADS = {'vit_base_patch16_gap_224': 16}
_GELU = {'gelu': 'erf', 'gelu_tanh': 'tanh', 'quick_gelu': 'quick'}
_POOL = {'cls': 'token', 'gap': 'avg', 'map': 'map'}
_RESIZE = {
    'nearest': 'nearest',
    'bilinear': 'bilinear',
    'bicubic': 'bicubic',
    'box': 'box',
    'lanczos': 'lanczos3',
}
# Names by the units of the ResNet's stages.
_HYBRIDS = {
    (): 'vit_tiny_r_s16_p8_224',
    (2, 2, 2, 2): 'vit_small_r26_s32_224',
    (3, 4, 9): 'vit_base_r50_s16_224',
    (3, 4, 6, 3): 'vit_large_r50_s32_224',
}
# Names by the units of the stages and by the width as a multiple of 64.
_BITS = {
    ((3, 4, 6, 3), 1): '50x1',
    ((3, 4, 6, 3), 3): '50x3',
    ((3, 4, 23, 3), 1): '101x1',
    ((3, 4, 23, 3), 3): '101x3',
    ((3, 8, 36, 3), 2): '152x2',
    ((3, 8, 36, 3), 4): '152x4',
}


class _Args(msgspec.Struct):
    """Arguments of the model that arrays do not show."""

    img_size: Sides | None = None
    embed_dim: Size | None = None
    depth: Layers | None = None
    num_heads: Size | None = None
    act_layer: str | None = None
    norm_layer: str | None = None
    global_pool: str | None = None
    pool_include_prefix: bool = False


class _Images(msgspec.Struct):
    """The object pretrained_cfg; older files have its keys in the outer object."""

    tag: str | None = None
    input_size: Annotated[list[Size], Meta(min_length=3, max_length=3)] | None = None
    crop_pct: Ratio | None = None
    crop_mode: str | None = None
    interpolation: str | None = None
    mean: Means | None = None
    std: Deviations | None = None
    global_pool: str | None = None
    label_names: list[str] | dict[str, str] | None = None


class _Config(_Images):
    architecture: str = ''
    model_args: _Args | None = None
    pretrained_cfg: _Images | None = None


_VIT = [
    *entries(
        {
            'cls': 'cls_token',
            'registers': 'reg_token',
            'position/embedding': 'pos_embed',
            'pool/probe': 'attn_pool.latent',
        }
    ),
    *torch_modules(
        {
            'embedding': 'patch_embed.proj',
            'stem_norm': 'norm_pre',
            'norm': 'norm',
            'head': 'head',
        }
    ),
    *entries({'scale1': 'ls1.gamma', 'scale2': 'ls2.gamma'}, within=('blocks/{i}/', 'blocks.{i}.')),
    *torch_modules(
        {
            'norm1': 'norm1',
            'attention/query key value': 'attn.qkv',
            'attention/out': 'attn.proj',
            'norm2': 'norm2',
            'mlp/dense1': 'mlp.fc1',
            'mlp/dense2': 'mlp.fc2',
        },
        within=('blocks/{i}/', 'blocks.{i}.'),
    ),
    *torch_modules(
        {
            'attention/query': 'q',
            'attention/key value': 'kv',
            'attention/out': 'proj',
            'norm': 'norm',
            'mlp/dense1': 'mlp.fc1',
            'mlp/dense2': 'mlp.fc2',
        },
        within=('pool/', 'attn_pool.'),
    ),
]
_FC_NORM = torch_modules({'norm': 'fc_norm'})


def _resnet(stem, stages):
    """Entries of a ResNet; `stem` and `stages` are prefixes of timm's names."""
    return [
        *torch_modules({'root_conv': 'conv', 'root_norm': 'norm'}, within=('resnet/', stem)),
        *torch_modules(
            {
                'conv1': 'conv1',
                'norm1': 'norm1',
                'conv2': 'conv2',
                'norm2': 'norm2',
                'conv3': 'conv3',
                'norm3': 'norm3',
                'conv_proj': 'downsample.conv',
                'norm_proj': 'downsample.norm',
            },
            within=('resnet/{s}/{j}/', stages + 'stages.{s}.blocks.{j}.'),
        ),
    ]


_BIT = [
    *_resnet(stem='stem.', stages=''),
    *torch_modules({'norm': 'norm'}),
    *torch_modules({'head': 'head.fc'}, 'dense_as_conv'),
]
_BACKBONE = 'patch_embed.backbone.'
_HYBRID = _VIT + _resnet(stem=f'{_BACKBONE}stem.', stages=_BACKBONE)
# timm has other names for the root of a ResNet without stages.
_ROOT_ONLY = _VIT + _resnet(stem=_BACKBONE, stages=_BACKBONE)


def _table(model):
    if 'hidden_size' not in model:
        return _BIT
    table = _ROOT_ONLY
    if model['resnet'] and model['resnet']['units']:
        table = _HYBRID
    if model['norm_after_pool']:
        table = _FC_NORM + table
    return table


def _read(contents):
    """Takes fields from config.json or, without it, from the defaults of timm's models."""
    arrays = contents.arrays
    config = _read_config(contents)
    args = config.model_args or _Args()
    images = config.pretrained_cfg or config
    preprocess = _preprocess(args, images)
    _check_pool(args, images, config, arrays)
    if 'stem.conv.weight' in arrays:
        reading = Reading(arrays, {'resnet': _RESNET}, _BIT)
    else:
        reading = _read_transformer(arrays, args, images, config, preprocess.get('image_size'))
    labels = config.label_names or images.label_names
    return reading._replace(
        classes=labels if isinstance(labels, list) else None, preprocess=preprocess or None
    )


def _read_config(contents):
    """The content of config.json; a file without an architecture is ignored."""
    raw = contents.sidecars.get('config.json', {})
    if 'architecture' not in raw:
        raw = {}
    return sidecars.checked(_Config, raw, 'config.json')


def _read_transformer(arrays, args, images, config, image_size):
    check_choice('norm_layer in config.json', args.norm_layer or 'not given', ('not given',))
    table = _ROOT_ONLY
    if f'{_BACKBONE}stem.conv.weight' in arrays:
        table = _HYBRID
    doubt = ''
    if not args.act_layer:
        doubt = published.doubt_of_gelu(f'{config.architecture}.{images.tag}')
    return Reading(
        _pad_position(arrays, image_size),
        _fields(arrays, args, config.architecture),
        table + _FC_NORM,
        assumed=() if config.architecture else ('gelu',),
        doubt=doubt,
    )


def _fields(arrays, args, architecture):
    """The fields of a transformer that its arrays do not show by their shapes."""
    act = args.act_layer or _usual_act(arrays, architecture)
    check_choice('act_layer in config.json', act, _GELU)
    fields = dict(
        resnet=_RESNET,
        gelu=_GELU[act],
        norm_after_pool='fc_norm.weight' in arrays,
        layer_norm_epsilon=1e-5 if 'norm_pre.weight' in arrays else 1e-6,
    )
    if architecture in _HEADS:
        fields['num_heads'] = _HEADS[architecture]
    for theirs, ours in _SIZES.items():
        value = getattr(args, theirs)
        if value:
            fields[ours] = value
    return fields


def _usual_act(arrays, architecture):
    """The activation of a model of timm whose config.json does not state it."""
    if architecture:
        is_tanh = re.search(published.TANH_MODELS, architecture)
    else:
        norm = np.shape(arrays.get('norm.weight'))
        kernel = np.shape(arrays.get('patch_embed.proj.weight'))
        position = np.shape(arrays.get('pos_embed'))
        is_tanh = published.is_tanh(norm, kernel[2:], position[1:2]) and 'cls_token' not in arrays
    if is_tanh:
        return 'gelu_tanh'
    if 'quickgelu' in architecture:
        return 'quick_gelu'
    return 'gelu'


def _preprocess(args, images):
    """The fields of `config.preprocess` that config.json states, and image_size."""
    check_choice('crop_mode in config.json', images.crop_mode or 'center', ('center', 'squash'))
    # 'random' is for training and leaves the method of evaluation open.
    check_choice(
        'interpolation in config.json', images.interpolation or 'random', (*_RESIZE, 'random')
    )
    size = args.img_size or (images.input_size or ())[1:]
    values = dict(
        image_size=as_pair(size) if size else None,
        crop_ratio=images.crop_pct,
        resize=_RESIZE.get(images.interpolation),
        mean=tuple(images.mean or ()),
        std=tuple(images.std or ()),
    )
    if images.crop_pct or images.crop_mode or images.interpolation:
        fit = 'squash' if images.crop_mode == 'squash' else 'torchvision'
        values |= dict(antialias=True, uint8_resize=True, fit=fit)
    return {field: value for field, value in values.items() if value}


def _check_pool(args, images, config, arrays):
    """Raises UserError unless the arrays show the pooling and vit_jax can do it."""
    pool = args.global_pool or images.global_pool or config.global_pool
    if args.pool_include_prefix or config.architecture == 'test_vit3':
        raise UserError(
            'this model of timm pools registers (pool_include_prefix), which vit_jax does not do: '
            'it cannot be loaded.',
            kind='inapplicable',
            field='pool_include_prefix',
        )
    if 'cls_token' in arrays and (pool == 'avg' or 'fc_norm.weight' in arrays):
        raise UserError(
            'this model of timm has a class token and pools the patches (global_pool avg, '
            'fc_norm), which vit_jax does not do: it cannot be loaded.',
            kind='inapplicable',
            field='global_pool',
        )
    if 'attn_pool.latent' in arrays:
        shown = 'map'
    elif 'cls_token' in arrays:
        shown = 'token'
    else:
        shown = 'avg'
    if pool not in (None, '', shown):
        raise UserError(
            f'global_pool in config.json is {pool!r:.80}: expected {shown!r}, the pooling of a '
            'model with these arrays.',
            kind='choice',
            field='global_pool',
            value=pool,
        )


def _pad_position(arrays, image_size):
    """Adds zeros for a class token and registers if only patches have positions (DeiT III)."""
    position = arrays.get('pos_embed', np.empty(0))
    kernel = arrays.get('patch_embed.proj.weight', np.empty(0))
    tokens = [arrays[name] for name in ('cls_token', 'reg_token') if name in arrays]
    prefix = sum(token.shape[1] for token in tokens if token.ndim == 3)
    if not prefix or position.ndim != 3 or kernel.ndim != 4 or not kernel.size:
        return arrays
    num_positions = position.shape[1]
    if image_size:
        num_patches = np.prod(np.floor_divide(image_size, kernel.shape[2:]))
        only_patches = num_positions == num_patches
    else:
        only_patches = _is_square(num_positions)
    if not only_patches:
        return arrays
    return arrays | {'pos_embed': np.pad(position, ((0, 0), (prefix, 0), (0, 0)))}


def _is_square(num_positions):
    """Whether this number of positions is a square, and so probably counts only patches."""
    return num_positions > 1 and math.isqrt(num_positions) ** 2 == num_positions


def _allowed_values(model, path):
    """The allowed values of fields; a directory allows more values than a file: see config.json."""
    resnet = _RESNET | dict(num_groups=32)
    allowed = PLAIN | only({f'resnet.{name}': value for name, value in resnet.items()})
    allowed |= dict(
        position=('learned_1d', 'none'),
        pool=tuple(_POOL),
        representation_size=(0,),
        layer_norm_epsilon=(1e-5 if model.get('stem_norm') else 1e-6,),
        stem_norm=(False, not model['resnet']),
        norm_after_pool=(False, model.get('pool') != 'cls'),
        layer_scale_init=(model.get('layer_scale_init'),),
        num_registers=(model.get('num_registers'),),
    )
    if 'hidden_size' in model and not is_directory(path):
        sizes = (model['hidden_size'], model['patch_size'][0])
        is_tanh = model['pool'] != 'cls' and published.TANH_SIZES.get(sizes) == 0
        allowed |= dict(gelu=('tanh' if is_tanh else 'erf',), num_heads=(guess_heads(model),))
    return allowed


def _refusals(weights, path):
    """Reasons why timm could not read the weights from the path."""
    if is_directory(path):
        return _directory_refusals(weights.model)
    return _file_refusals(weights)


def _directory_refusals(model):
    if architecture(model):
        return []
    units = model['resnet']['units']
    width = model['resnet']['width']
    return [
        f'timm has no name for a ResNet with units {units} and width {width}, which config.json '
        'needs: name a file, such as model.safetensors'
    ]


def _file_refusals(weights):
    model = weights.model
    grid = weights.grid()
    if not grid:
        return []
    patches = math.prod(grid)
    looks_tanh = published.is_tanh((model['hidden_size'],), model['patch_size'], (patches,))
    if model['pool'] != 'cls' and model['gelu'] == 'erf' and looks_tanh:
        return ['a file would be read as a model of SigLIP 2, whose GELU is tanh: name a directory']
    prefix = num_prefix_tokens(model)
    if prefix and _is_square(patches + prefix):
        return [
            f'a file would be read as a square of patches without other tokens, which has as '
            f'many positions as {grid[0]}x{grid[1]} and {prefix} more: name a directory'
        ]
    return []


def architecture(model: Mapping) -> str | None:
    """The name of a timm model, None if none fits; `model_arguments` returns its sizes."""
    resnet = model['resnet']
    if not resnet:
        if model['stem_norm']:
            return 'vit_base_patch16_clip_224'
        sizes = (model['hidden_size'], tuple(model['patch_size']))
        return _NAMES.get(sizes, 'vit_base_patch16_224')
    width = resnet['width'] / 64
    units = tuple(resnet['units'])
    if 'hidden_size' in model:
        return _HYBRIDS.get(units) if width == 1 else None
    if (units, width) not in _BITS:
        return None
    return f'resnetv2_{_BITS[units, width]}_bit'


def model_arguments(weights: Weights) -> dict:
    """The arguments with which timm's `architecture` builds the model of these weights."""
    model = weights.model
    arguments = dict(in_chans=weights.channels())
    if 'hidden_size' not in model:
        return arguments
    if model['layer_scale_init']:
        arguments['init_values'] = model['layer_scale_init']
    return arguments | dict(
        img_size=weights.image_size(),
        global_pool=_POOL[model['pool']],
        class_token=model['pool'] == 'cls',
        fc_norm=model['norm_after_pool'],
        reg_tokens=model['num_registers'],
        pos_embed={'learned_1d': 'learn', 'none': 'none'}[model['position']],
        patch_size=model['patch_size'],
        embed_dim=model['hidden_size'],
        depth=model['num_layers'],
        num_heads=model['num_heads'],
        mlp_ratio=_mlp_ratio(model['mlp_dim'], model['hidden_size']),
        act_layer={ours: theirs for theirs, ours in _GELU.items()}[model['gelu']],
    )


def _mlp_ratio(mlp_dim, hidden_size):
    """The ratio from which timm, which rounds down, computes `mlp_dim`."""
    exact = mlp_dim / hidden_size
    if int(hidden_size * exact) == mlp_dim:
        return exact
    return (mlp_dim + 0.5) / hidden_size


def _write_sidecars(weights):
    """Makes config.json: the name of a timm model, its arguments, and the image preparation."""
    description.log_other_pixels(weights, 'torchvision')
    is_transformer = 'hidden_size' in weights.model
    preprocess = weights.preprocess or {}
    arguments = model_arguments(weights)
    their_resize = {ours: theirs for theirs, ours in _RESIZE.items()}
    images = dict(
        input_size=(weights.channels(), *weights.image_size()),
        num_classes=weights.num_classes,
        fixed_input_size=is_transformer,
        crop_pct=preprocess.get('crop_ratio'),
        interpolation=their_resize.get(preprocess.get('resize', '').replace('area', 'box')),
        crop_mode='squash' if preprocess.get('fit') == 'squash' else None,
        mean=preprocess.get('mean'),
        std=preprocess.get('std'),
        classifier='head' if is_transformer else 'head.fc',
    )
    config = {
        'architecture': architecture(weights.model),
        'num_classes': weights.num_classes,
        'label_names': weights.classes or None,
        'global_pool': arguments.get('global_pool', 'avg'),
        'model_args': arguments,
        'pretrained_cfg': {name: x for name, x in images.items() if x is not None},
    }
    return {'config.json': {name: x for name, x in config.items() if x is not None}}


LAYOUT = Layout(
    mark=r'patch_embed\.(backbone\..+|proj\.weight)|stem\.conv\.weight',
    suffixes=('', '.safetensors', '.pth', '.pt', '.bin'),
    read=_read,
    table=_table,
    allowed_values=_allowed_values,
    refusals=_refusals,
    usual_preprocess=published.choose,
    sidecars=_write_sidecars,
)
