"""The models of timm and transformers with our parameters, for comparisons.

The functions import PyTorch and its packages, so that the collection of other tests stays fast. A
test that needs a missing package is skipped.
"""

import contextlib
import enum
import functools
import importlib
import importlib.util
import os
import sys
import types

import jax
import numpy as np
import pytest


def require(name):
    """Imports a package of requirements-interop.txt, or skips the test, but never in CI."""
    if name in ('timm', 'torchvision', 'transformers'):
        declare_torchvision_operators()
    if 'VIT_JAX_CI' in os.environ:
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f'needs {name}: make .venv/interop')


@functools.cache
def import_timm():
    """Imports timm, which imports torchvision, although no model here uses it."""
    require('torch')
    with torchvision_or_stand_in():
        return require('timm')


@functools.cache
def declare_torchvision_operators():
    """Makes torchvision importable if its build does not fit the build of torch.

    Such a torchvision does not load its compiled operators, and its import fails because torch does
    not know two of them. Images and transforms use no operator.
    """
    if not importlib.util.find_spec('torchvision') or not importlib.util.find_spec('torch'):
        return
    import torch

    library = torch.library.Library('torchvision', 'FRAGMENT')
    for name in ('nms', 'qnms'):
        with contextlib.suppress(RuntimeError):  # a fitting build has declared them
            library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
    _LIBRARIES.append(library)


_LIBRARIES = []  # torch forgets a library without references


class AnyName(types.ModuleType):
    """A module whose names are all empty classes."""

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return type(name, (), {})


@contextlib.contextmanager
def torchvision_or_stand_in():
    """Makes torchvision importable in this context: the installed one, or one of empty classes.

    The context removes the stand-in at its end, because transformers and tests check whether
    torchvision is installed.
    """
    if importlib.util.find_spec('torchvision'):
        declare_torchvision_operators()
        yield
        return
    modules = _torchvision_stand_in()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.partition('.')[0] == 'torchvision']:
            del sys.modules[name]


def _torchvision_stand_in():
    modules = {
        name: AnyName(name)
        for name in (
            'torchvision',
            'torchvision.datasets',
            'torchvision.ops',
            'torchvision.ops.misc',
            'torchvision.transforms',
            'torchvision.transforms.functional',
        )
    }
    for name, module in modules.items():
        parent, _, child = name.rpartition('.')
        if parent:
            setattr(modules[parent], child, module)
    modules['torchvision.transforms.functional'].InterpolationMode = enum.Enum(
        'InterpolationMode', 'NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS'
    )
    return modules


# Our parameters with the names and layouts of other projects.


def to_timm(params, last_norm='norm'):
    """State dict of timm's VisionTransformer, with or without a ResNet before it, or ResNetV2.

    Args:
      params: our parameters.
      last_norm: timm's name of the last norm: fc_norm after pooling.
    """
    p = jax.tree.map(np.asarray, params)
    resnet = resnet_to_timm(p['resnet']) if 'resnet' in p else {}
    if 'embedding' not in p:
        head = p['head']['kernel'][None, None]  # timm's head is a 1x1 convolution
        return tensors(
            params,
            resnet | {'norm': norm(p['norm']), 'head': {'fc': conv(p['head'] | {'kernel': head})}},
        )
    if resnet and 'stages' not in resnet:
        resnet = resnet['stem']  # R+Ti/16: timm's backbone is only the stem
    return tensors(
        params,
        {
            'patch_embed': {'backbone': resnet, 'proj': conv(p['embedding'])},
            'cls_token': p.get('cls'),
            'reg_token': p.get('registers'),
            'norm_pre': norm(p['stem_norm']) if 'stem_norm' in p else {},
            'pos_embed': p.get('position', {}).get('embedding'),
            'blocks': [
                {
                    'norm1': norm(block['norm1']),
                    'attn': {
                        'qkv': to_heads(
                            *(block['attention'][n] for n in ('query', 'key', 'value'))
                        ),
                        'proj': from_heads(block['attention']['out']),
                    },
                    'ls1': {'gamma': block.get('scale1')},
                    'norm2': norm(block['norm2']),
                    'mlp': mlp(block['mlp']),
                    'ls2': {'gamma': block.get('scale2')},
                }
                for block in unstack(p['blocks'])
            ],
            last_norm: norm(p['norm']),
            'attn_pool': pool_to_timm(p['pool']) if 'pool' in p else {},
            'head': dense(p['head']) if 'head' in p else {},
        },
    )


def resnet_to_timm(p):
    def unit(p):
        names = [n for n in p if not n.endswith('_proj')]
        return {n: conv(p[n]) if n.startswith('conv') else norm(p[n]) for n in names} | {
            'downsample': {
                'conv': conv(p['conv_proj']) if 'conv_proj' in p else {},
                'norm': norm(p['norm_proj']) if 'norm_proj' in p else {},
            }
        }

    stem = {'conv': conv(p['root_conv']), 'norm': norm(p['root_norm']) if 'root_norm' in p else {}}
    stages = [p[f'stage{i + 1}'] for i in range(sum(name.startswith('stage') for name in p))]
    if not stages:
        return {'stem': stem}
    return {
        'stem': stem,
        'stages': [
            {'blocks': [unit(u) for u in (stage['first'], *unstack(stage.get('rest', {})))]}
            for stage in stages
        ],
    }


def pool_to_timm(p):
    a = p['attention']
    return {
        'latent': p['probe'],
        'q': to_heads(a['query']),
        'kv': to_heads(a['key'], a['value']),
        'proj': from_heads(a['out']),
        'norm': norm(p['norm']),
        'mlp': mlp(p['mlp']),
    }


def to_huggingface(params):
    """State dict of transformers' ViTForImageClassification; `pre_logits` is its pooler."""
    p = jax.tree.map(np.asarray, params)
    return tensors(
        params,
        {
            'vit': {
                'embeddings': {
                    'cls_token': p['cls'],
                    'position_embeddings': p['position']['embedding'],
                    'patch_embeddings': {'projection': conv(p['embedding'])},
                },
                'layers': [
                    {
                        'layernorm_before': norm(block['norm1']),
                        'attention': {
                            'q_proj': to_heads(block['attention']['query']),
                            'k_proj': to_heads(block['attention']['key']),
                            'v_proj': to_heads(block['attention']['value']),
                            'o_proj': from_heads(block['attention']['out']),
                        },
                        'layernorm_after': norm(block['norm2']),
                        'mlp': mlp(block['mlp']),
                    }
                    for block in unstack(p['blocks'])
                ],
                'layernorm': norm(p['norm']),
                'pooler': {'dense': dense(p['pre_logits'])} if 'pre_logits' in p else {},
            },
            'classifier': dense(p['head']),
        },
    )


def tensors(params, tree):
    """{'blocks.0.norm1.weight': tensor, ...}; asserts that `tree` is as large as `params`."""
    torch = require('torch')
    state = {
        jax.tree_util.keystr(path, simple=True, separator='.'): torch.from_numpy(np.array(x))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    ours = sum(x.size for x in jax.tree.leaves(params))
    theirs = sum(x.numel() for x in state.values())
    assert ours == theirs, f'{ours:,} numbers in our parameters and {theirs:,} in {list(state)}'
    return state


def unstack(tree):
    """Splits a tree of arrays [num_layers, ...] into the trees of the layers."""
    lengths = {len(x) for x in jax.tree.leaves(tree)} or {0}
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(*lengths)]


def norm(p):
    return {'weight': p['scale'], 'bias': p['bias']}


def dense(p):
    return {'weight': p['kernel'].T, 'bias': p['bias']}


def mlp(p):
    return {'fc1': dense(p['dense1']), 'fc2': dense(p['dense2'])}


def conv(p):
    return {'weight': p['kernel'].transpose(3, 2, 0, 1), 'bias': p.get('bias')}


def to_heads(*projections):
    """A linear layer for several projections, with outputs ordered by projection, then head."""
    return {
        'weight': np.concatenate(
            [p['kernel'].reshape(len(p['kernel']), -1).T for p in projections]
        ),
        'bias': np.concatenate([p['bias'].ravel() for p in projections]),
    }


def from_heads(p):
    return {'weight': p['kernel'].reshape(-1, p['kernel'].shape[-1]).T, 'bias': p['bias']}


# The models of other projects from our fields.


def timm_vit(fields, image_shape, num_classes):
    """timm's VisionTransformer with the same sizes; a hybrid if `fields` has a `resnet`."""
    timm = import_timm()
    *image_size, channels = image_shape
    pool = fields.get('pool', 'cls')
    position = fields.get('position', 'learned_1d')
    embed = timm.layers.PatchEmbed
    if fields.get('resnet'):
        embed = functools.partial(
            timm.layers.HybridEmbed, backbone=timm_resnet(fields['resnet'], channels)
        )
    return timm.models.vision_transformer.VisionTransformer(
        img_size=tuple(image_size),
        patch_size=fields['patch_size'],
        in_chans=channels,
        num_classes=num_classes,
        embed_dim=fields['hidden_size'],
        depth=fields['num_layers'],
        num_heads=fields['num_heads'],
        mlp_ratio=(fields['mlp_dim'] + 0.5) / fields['hidden_size'],  # timm rounds down
        act_layer={'tanh': 'gelu_tanh', 'erf': 'gelu', 'quick': 'quick_gelu'}[
            fields.get('gelu', 'tanh')
        ],
        norm_layer=functools.partial(
            timm.layers.LayerNorm, eps=fields.get('layer_norm_epsilon', 1e-6)
        ),
        init_values=fields.get('layer_scale_init') or None,
        embed_layer=embed,
        pos_embed={'learned_1d': 'learn', 'none': 'none'}[position],
        global_pool={'cls': 'token', 'gap': 'avg', 'map': 'map', 'none': ''}[pool],
        class_token=pool == 'cls',
        fc_norm=fields.get('norm_after_pool', False),
        reg_tokens=fields.get('num_registers', 0),
        pre_norm=fields.get('stem_norm', False),
    )


def timm_bit(fields, image_shape, num_classes):
    """timm's ResNetV2 with the same sizes."""
    return timm_resnet(
        fields['resnet'], image_shape[-1], num_classes=num_classes, global_pool='avg'
    )


def timm_model(weights):
    """timm's model with the same sizes as the model of Weights."""
    make = timm_vit if 'hidden_size' in weights.model else timm_bit
    return make(weights.model, (*weights.image_size(), weights.channels()), weights.num_classes)


def timm_resnet(resnet, channels, num_classes=0, global_pool=''):
    """timm's ResNetV2, or only its stem if there are no units."""
    timm = import_timm()
    fixed = resnet['fixed_padding']
    convolution = timm.layers.StdConv2d if fixed else timm.layers.StdConv2dSame
    if resnet['weight_epsilon_on'] == 'std':
        convolution = divided_by_std(convolution)
    shared = dict(
        stem_type='fixed' if fixed else 'same',
        preact=resnet['preactivation'],
        conv_layer=functools.partial(convolution, eps=resnet['weight_epsilon']),
        norm_layer=functools.partial(
            timm.layers.GroupNormAct,
            num_groups=resnet['num_groups'],
            eps=resnet['group_norm_epsilon'],
        ),
    )
    if not resnet['units']:
        return timm.models.resnetv2.create_resnetv2_stem(channels, resnet['width'], **shared)
    return timm.models.resnetv2.ResNetV2(
        resnet['units'],
        channels=[4 * resnet['width'] * 2**i for i in range(len(resnet['units']))],
        stem_chs=resnet['width'],
        in_chans=channels,
        num_classes=num_classes,
        global_pool=global_pool,
        **shared,
    )


def divided_by_std(convolution):
    """timm's convolution with the weight standardisation of Google's hybrids, w / (std + eps)."""
    torch = require('torch')
    pad_same = import_timm().layers.pad_same

    class Convolution(convolution):
        def forward(self, x):
            if getattr(self, 'same_pad', False):
                x = pad_same(x, self.kernel_size, self.stride, self.dilation)
            std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
            weight = (self.weight - mean) / (std + self.eps)
            return torch.nn.functional.conv2d(x, weight, None, self.stride, self.padding)

    return Convolution


def huggingface_vit(fields, image_shape, num_classes):
    """transformers' ViTForImageClassification with the same sizes."""
    torch = require('torch')
    transformers = require('transformers')
    *image_size, channels = image_shape
    representation_size = fields.get('representation_size', 0)
    config = transformers.ViTConfig(
        hidden_size=fields['hidden_size'],
        num_hidden_layers=fields['num_layers'],
        num_attention_heads=fields['num_heads'],
        intermediate_size=fields['mlp_dim'],
        hidden_act={'tanh': 'gelu_pytorch_tanh', 'erf': 'gelu', 'quick': 'quick_gelu'}[
            fields.get('gelu', 'tanh')
        ],
        layer_norm_eps=fields.get('layer_norm_epsilon', 1e-6),
        image_size=tuple(image_size),
        patch_size=tuple(fields['patch_size']),
        num_channels=channels,
        num_labels=num_classes,
        pooler_output_size=representation_size or None,
    )
    model = transformers.ViTForImageClassification(config)
    if (
        representation_size
    ):  # transformers has no classifier with its pooler, a dense layer and tanh
        model.vit = transformers.ViTModel(config)
        model.classifier = torch.nn.Linear(representation_size, num_classes)
        model.forward = lambda x: model.classifier(model.vit(x).pooler_output)
    return model


def load(model, state):
    """Loads exactly these arrays into the model and sets it to evaluation."""
    model.load_state_dict(state, strict=True)
    return model.eval()


def logits(model, images):
    """NumPy logits of images [batch, height, width, channels]."""
    torch = require('torch')
    with torch.inference_mode():
        out = model(torch.from_numpy(np.array(images)).permute(0, 3, 1, 2))
    return getattr(out, 'logits', out).numpy()
