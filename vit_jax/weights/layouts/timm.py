"""timm's VisionTransformer, hybrid or not, and ResNetV2 (BiT): .safetensors, .pth or a directory.

A directory has the config.json of timm's models on the Hugging Face hub; timm.create_model opens
it as 'local-dir:DIR'. A file alone holds what timm's models are without further arguments.
"""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.vit import as_pair
from vit_jax.weights.files import is_directory
from vit_jax.weights.model import guess_heads
from vit_jax.weights.table import Entry, torch_conv, torch_dense, torch_heads, torch_norm

MARK = r'patch_embed\.(backbone\..+|proj\.weight)|stem\.conv\.weight'
SUFFIXES = ('', '.safetensors', '.pth', '.pt', '.bin')
# GroupNorm and StdConv2d of timm's hybrids and BiT models.
_RESNET = dict(group_norm_epsilon=1e-5, weight_epsilon=1e-8, weight_epsilon_on='variance')
_SIZES = {'embed_dim': 'hidden_size', 'depth': 'num_layers', 'num_heads': 'num_heads'}
# By width, and for which patches; what else a model is goes with it as arguments.
_NAMES = {192: ('tiny', (16,)), 384: ('small', (8, 16, 32)), 768: ('base', (8, 16, 32)),
          1024: ('large', (14, 16, 32)), 1280: ('huge', (14,))}
# Of the models of timm whose number of heads guess_heads does not find.
_HEADS = {'test_vit': 2, 'vit_base_patch16_gap_224': 16,
          **{f'vit_giantopt_patch16_siglip_{name}': 16 for name in ('256', '384', 'gap_256',
                                                                    'gap_384')}}
_GELU = {'gelu': 'erf', 'gelu_tanh': 'tanh'}
_POOL = {'cls': 'token', 'gap': 'avg', 'map': 'map'}
_RESIZE = {'nearest': 'nearest', 'bilinear': 'bilinear', 'bicubic': 'bicubic',
           'lanczos': 'lanczos3', 'box': 'area'}
_HYBRIDS = {(): 'vit_tiny_r_s16_p8_224', (2, 2, 2, 2): 'vit_small_r26_s32_224',
            (3, 4, 9): 'vit_base_r50_s16_224', (3, 4, 6, 3): 'vit_large_r50_s32_224'}
_BITS = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
_BIT_NAMES = [f'resnetv2_{name}_bit' for name in ('50x1', '50x3', '101x1', '101x3', '152x2',
                                                  '152x4')]
_TANH_MODELS = r'(patch32|so400m_patch16|giantopt_patch16)_siglip|large_patch16_siglip_(gap_)?512'


def _mlp(ours, theirs):
    return torch_dense(f'{ours}/dense1', f'{theirs}.fc1') + torch_dense(f'{ours}/dense2',
                                                                        f'{theirs}.fc2')


_BLOCK, _THEIRS = 'blocks/{i}', 'blocks.{i}'
_VIT = [
    *torch_conv('embedding', 'patch_embed.proj'),
    Entry(('cls',), 'cls_token'),
    Entry(('position/embedding',), 'pos_embed'),
    *torch_norm(f'{_BLOCK}/norm1', f'{_THEIRS}.norm1'),
    *torch_heads(f'{_BLOCK}/attention', f'{_THEIRS}.attn.qkv.', 'query key value'),
    *torch_dense(f'{_BLOCK}/attention/out', f'{_THEIRS}.attn.proj', 'from_heads'),
    Entry((f'{_BLOCK}/scale1',), f'{_THEIRS}.ls1.gamma'),
    *torch_norm(f'{_BLOCK}/norm2', f'{_THEIRS}.norm2'),
    *_mlp(f'{_BLOCK}/mlp', f'{_THEIRS}.mlp'),
    Entry((f'{_BLOCK}/scale2',), f'{_THEIRS}.ls2.gamma'),
    *torch_norm('norm', 'norm'),
    Entry(('pool/probe',), 'attn_pool.latent'),
    *torch_heads('pool/attention', 'attn_pool.q.', 'query'),
    *torch_heads('pool/attention', 'attn_pool.kv.', 'key value'),
    *torch_dense('pool/attention/out', 'attn_pool.proj', 'from_heads'),
    *torch_norm('pool/norm', 'attn_pool.norm'),
    *_mlp('pool/mlp', 'attn_pool.mlp'),
    *torch_dense('head', 'head')]


def _resnet(stem, stages):
    unit, theirs = 'resnet/{s}/{j}', stages + 'stages.{s}.blocks.{j}'
    return [*torch_conv('resnet/root_conv', f'{stem}conv'),
            *torch_norm('resnet/root_norm', f'{stem}norm'),
            *(entry for n in (1, 2, 3) for entry in (
                *torch_conv(f'{unit}/conv{n}', f'{theirs}.conv{n}'),
                *torch_norm(f'{unit}/norm{n}', f'{theirs}.norm{n}'))),
            *torch_conv(f'{unit}/conv_proj', f'{theirs}.downsample.conv'),
            *torch_norm(f'{unit}/norm_proj', f'{theirs}.downsample.norm')]


_BIT = [*_resnet('stem.', ''), *torch_norm('norm', 'norm'),
        *torch_dense('head', 'head.fc', 'dense_as_conv')]
_BACKBONE = 'patch_embed.backbone.'
_HYBRID = _VIT + _resnet(f'{_BACKBONE}stem.', _BACKBONE)
_ROOT_ONLY = _VIT + _resnet(_BACKBONE, _BACKBONE)


def table(model: dict) -> list[Entry]:
    """Which array holds what; under a transformer, a root without stages is named differently."""
    if 'hidden_size' not in model:
        return _BIT
    return _HYBRID if (model['resnet'] or {}).get('units') else _ROOT_ONLY


def prepare(arrays: dict, sidecars: dict) -> tuple[dict, list[Entry]]:
    """The arrays with a position embedding of the class token, and the table that has them.

    Without a config.json that has the image size, as many positions as a square has patches are
    taken to be those of patches alone.

    Raises UserError for a model that averages its tokens before the last LayerNorm (fc_norm).
    """
    if 'stem.conv.weight' in arrays:
        return arrays, _BIT
    config = _config(sidecars)
    if 'fc_norm.weight' in arrays or (config.get('global_pool') == 'avg' and 'cls_token' in arrays):
        raise UserError('this model of timm averages its tokens before the last LayerNorm '
                        '(fc_norm) or with a class token; here the mean is taken after it, of '
                        'patches: it cannot be loaded.')
    position, kernel = (arrays.get(name, np.empty(0)) for name in (
        'pos_embed', 'patch_embed.proj.weight'))
    if 'cls_token' in arrays and position.ndim == 3 and kernel.ndim == 4 and kernel.size:
        number, size = position.shape[1], _image_size(config)
        if size:
            alone = number == math.prod(s // p for s, p in zip(size, kernel.shape[2:], strict=True))
        else:  # a square of patches is likelier than one patch less
            alone = _looks_alone(number)
        if alone:  # as in DeiT III and FlexiViT (no_embed_class)
            arrays = arrays | {'pos_embed': np.pad(position, ((0, 0), (1, 0), (0, 0)))}
    return arrays, _HYBRID if f'{_BACKBONE}stem.conv.weight' in arrays else _ROOT_ONLY


def known(arrays: dict, sidecars: dict) -> tuple[dict, list | None, dict | None]:
    """Of timm's models, or as the arguments in config.json say."""
    config = _config(sidecars)
    args, cfg, name = config['model_args'], config['pretrained_cfg'], config['architecture']
    act = args.get('act_layer', 'gelu_tanh' if re.search(_TANH_MODELS, name) else 'gelu')
    fields = {} if 'stem.conv.weight' in arrays else dict(
        gelu=_GELU.get(act, act), layer_norm_epsilon=1e-6)
    if name in _HEADS:
        fields['num_heads'] = _HEADS[name]
    fields |= {ours: args[theirs] for theirs, ours in _SIZES.items() if theirs in args}
    preprocess = dict(image_size=_image_size(config), crop_ratio=cfg.get('crop_pct'),
                      resize=_RESIZE.get(cfg.get('interpolation')),
                      mean=tuple(cfg.get('mean', ())), std=tuple(cfg.get('std', ())))
    labels = config.get('label_names', cfg.get('label_names'))
    return (fields | {'resnet': _RESNET}, labels if isinstance(labels, list) else None,
            {name: value for name, value in preprocess.items() if value} or None)


def _config(sidecars):
    config = sidecars.get('config.json', {})
    if 'architecture' not in config:  # some other program's
        config = {'architecture': ''}
    return {'model_args': {}, 'pretrained_cfg': config} | config


def is_ambiguous(weights, path: str) -> bool:
    """Whether a file, without a config.json, would be read as of another grid of patches."""
    grid = weights.grid()
    return bool(grid and weights.model['pool'] == 'cls' and not is_directory(path)
                and _looks_alone(math.prod(grid) + 1))


def _looks_alone(number):
    """Whether so many positions are those of a square of patches, without a class token."""
    return _is_square(number) and not _is_square(number - 1)


def _is_square(number):
    return math.isqrt(number) ** 2 == number


def _image_size(config):
    size = (config['model_args'].get('img_size')
            or tuple(config['pretrained_cfg'].get('input_size', ()))[1:])
    return as_pair(size) if size else None


def holds(model: dict, path: str) -> dict[str, tuple]:
    """Values of fields that the layout can hold: more in a directory, which has a config.json."""
    resnet = {f'resnet.{name}': (value,) for name, value in _RESNET.items()}
    if 'hidden_size' not in model:
        return resnet | {'resnet.num_groups': (32,)}
    alone = {} if is_directory(path) else dict(gelu=('erf',), num_heads=(guess_heads(model),))
    return (resnet | {'resnet.num_groups': (32,)} if model['resnet'] else {}) | alone | dict(
        position=('learned_1d', 'none'), pool=tuple(_POOL), layer_norm_epsilon=(1e-6,),
        representation_size=(0,))


def finish(arrays: dict, weights) -> tuple[dict, dict]:
    """The arrays, and the config.json of a directory."""
    return arrays, {'config.json': lambda: write_config(weights)}


def write_config(weights) -> dict:
    """What config.json says: the name of a model of timm, its arguments, and what images are.

    Raises UserError when timm has no named model of which this one is a variant.
    """
    model, given = weights.model, weights.preprocess or {}
    image_size = weights.image_size()
    args = dict(img_size=image_size, global_pool=_POOL[model['pool']],
                class_token=model['pool'] == 'cls', fc_norm=False,
                pos_embed={'learned_1d': 'learn', 'none': 'none'}[model['position']],
                patch_size=model['patch_size'], embed_dim=model['hidden_size'],
                depth=model['num_layers'], num_heads=model['num_heads'],
                mlp_ratio=(model['mlp_dim'] + 0.5) / model['hidden_size'],  # timm rounds down
                init_values=model['layer_scale_init'] or None,
                act_layer={'erf': 'gelu', 'tanh': 'gelu_tanh'}[model['gelu']],
                ) if 'hidden_size' in model else {}
    args |= dict(in_chans=weights.channels())
    resize = {ours: theirs for theirs, ours in _RESIZE.items()}
    cfg = dict(input_size=(weights.channels(), *image_size), num_classes=weights.num_classes,
               fixed_input_size='hidden_size' in model, crop_pct=given.get('crop_ratio'),
               interpolation=resize.get(given.get('resize')), mean=given.get('mean'),
               std=given.get('std'), classifier='head' if 'hidden_size' in model else 'head.fc')
    return {'architecture': _architecture(model), 'num_classes': weights.num_classes,
            **({'label_names': weights.classes} if weights.classes else {}),
            'global_pool': args.get('global_pool', 'avg'),
            'model_args': {k: v for k, v in args.items() if v is not None},
            'pretrained_cfg': {k: v for k, v in cfg.items() if v is not None}}


def _architecture(model):
    """A name that timm has; sizes of transformers are given to it as arguments."""
    resnet = model['resnet']
    if not resnet:
        size, patch = _NAMES.get(model['hidden_size']), tuple(model['patch_size'])
        named = size and patch in [(p, p) for p in size[1]]
        return f'vit_{size[0]}_patch{patch[0]}_224' if named else 'vit_base_patch16_224'
    width, units = resnet['width'] / 64, tuple(resnet['units'])
    if 'hidden_size' in model and width == 1 and units in _HYBRIDS:
        return _HYBRIDS[units]
    name = f'resnetv2_{_BITS.get(units)}x{width:g}_bit'
    if 'hidden_size' in model or name not in _BIT_NAMES:
        raise UserError(f'timm has no name for a ResNet with units {units} and width '
                        f'{resnet["width"]}, which config.json needs: name a file instead of a '
                        'directory, as in model.safetensors.')
    return name
