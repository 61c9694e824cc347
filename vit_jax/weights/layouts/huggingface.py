"""transformers' ViTForImageClassification, or ViTModel without a head: a directory.

Version 5 of transformers has new names, but reads the older ones too, which are written here.
"""

import logging

from vit_jax.errors import UserError
from vit_jax.models.vit import as_pair
from vit_jax.weights.layout import PLAIN, Layout, Reading
from vit_jax.weights.table import Entry, torch_modules

log = logging.getLogger(__name__)

_SIZES = {'hidden_size': 'hidden_size', 'num_layers': 'num_hidden_layers',
          'num_heads': 'num_attention_heads', 'mlp_dim': 'intermediate_size'}
_DEFAULTS = dict(hidden_act='gelu', layer_norm_eps=1e-12, num_attention_heads=12, image_size=224)
_GELU = {'gelu': 'erf', 'gelu_pytorch_tanh': 'tanh', 'gelu_new': 'tanh', 'gelu_fast': 'tanh'}
_RESAMPLE = {0: 'nearest', 1: 'lanczos3', 2: 'bilinear', 3: 'bicubic', 4: 'area'}  # Pillow's

_BLOCK, _THEIRS, _THEIRS_NEWER = 'blocks/{i}', 'vit.encoder.layer.{i}', 'vit.layers.{i}'
_TABLE = [
    Entry(('cls',), 'vit.embeddings.cls_token'),
    Entry(('position/embedding',), 'vit.embeddings.position_embeddings'),
    *torch_modules({
        'embedding': 'vit.embeddings.patch_embeddings.projection',
        f'{_BLOCK}/norm1': f'{_THEIRS}.layernorm_before',
        **{f'{_BLOCK}/attention/{name}': f'{_THEIRS}.attention.attention.{name}'
           for name in ('query', 'key', 'value')},
        f'{_BLOCK}/attention/out': f'{_THEIRS}.attention.output.dense',
        f'{_BLOCK}/norm2': f'{_THEIRS}.layernorm_after',
        f'{_BLOCK}/mlp/dense1': f'{_THEIRS}.intermediate.dense',
        f'{_BLOCK}/mlp/dense2': f'{_THEIRS}.output.dense',
        'norm': 'vit.layernorm',
        'pre_logits': 'vit.pooler.dense',
        'head': 'classifier'})]
_NEWER = torch_modules({f'{_BLOCK}/{ours}': f'{_THEIRS_NEWER}.{theirs}' for ours, theirs in {
    'norm1': 'layernorm_before', 'attention/query': 'attention.q_proj',
    'attention/key': 'attention.k_proj', 'attention/value': 'attention.v_proj',
    'attention/out': 'attention.o_proj', 'norm2': 'layernorm_after', 'mlp/dense1': 'mlp.fc1',
    'mlp/dense2': 'mlp.fc2'}.items()})


def _read(contents):
    """Fields are in config.json, the preparation of images in preprocessor_config.json.

    A pooler that the head does not use is dropped. Processors may squeeze images into a square;
    here they are cropped to one.
    """
    config, processor = (contents.sidecars.get(name, {}) for name in (
        'config.json', 'preprocessor_config.json'))
    if config.get('model_type') != 'vit':
        raise UserError('weights of transformers need their own config.json in the same directory, '
                        f'with model_type vit; found {config.get("model_type")!r}.')
    prefix = '' if any(name.startswith('vit.') for name in contents.arrays) else 'vit.'
    arrays = {name if name.startswith('classifier.') else prefix + name: x
              for name, x in contents.arrays.items()}
    if 'classifier.weight' in arrays:
        arrays = {name: x for name, x in arrays.items() if not name.startswith('vit.pooler.')}
    config, act = _DEFAULTS | config, config.get('hidden_act', 'gelu')
    fields = {ours: config[theirs] for ours, theirs in _SIZES.items() if theirs in config} | dict(
        gelu=_GELU.get(act, act), layer_norm_epsilon=config['layer_norm_eps'])
    preprocess = dict(image_size=as_pair(config['image_size']))
    labels = {int(k): name for k, name in config.get('id2label', {}).items()}
    classes = [labels[k] for k in sorted(labels)]
    named = classes != [f'LABEL_{k}' for k in range(len(classes))]
    return Reading(arrays, fields, _TABLE + _NEWER, classes=classes if named else None,
                   preprocess=preprocess | (_read_processor(processor) if processor else {}))


def _read_processor(given):
    side = _side(given.get('size'))
    crop = _side(given.get('crop_size')) if given.get('do_center_crop') else None
    normalise = given.get('do_normalize', True)
    values = dict(resize=_RESAMPLE.get(given.get('resample')),
                  crop_ratio=crop / side if crop and side else 1.0,
                  mean=tuple(given.get('image_mean', ())) if normalise else (0.0,) * 3,
                  std=tuple(given.get('image_std', ())) if normalise else (1.0,) * 3)
    return {name: value for name, value in values.items() if value}


def _side(size):
    """Of a size as processors write it: {'height', 'width'}, {'shortest_edge'} or a number."""
    if isinstance(size, dict):
        return max(size.get(name) or 0 for name in ('shortest_edge', 'height', 'width'))
    return size if isinstance(size, int) else None


def _refusals(weights, path):
    size = weights.model['representation_size']
    return [f'model.representation_size is {size}: ViTForImageClassification has no hidden layer '
            'before its head'] if size and weights.num_classes else []


def _sidecars(weights):
    config = {'config.json': _write_config(weights)}
    height, width = weights.image_size()
    given = weights.preprocess or {}
    if not {'resize', 'crop_ratio', 'mean', 'std'} <= given.keys():
        return config
    if height == width:  # CLIP's processor keeps the aspect ratio and crops the middle, as we do
        return config | {'preprocessor_config.json': dict(
            image_processor_type='CLIPImageProcessor', do_resize=True,
            size=dict(shortest_edge=round(height / given['crop_ratio'])),
            resample={name: k for k, name in _RESAMPLE.items()}[given['resize']],
            do_center_crop=True, crop_size=dict(height=height, width=width), do_rescale=True,
            rescale_factor=1 / 255, do_normalize=True, image_mean=given['mean'],
            image_std=given['std'], do_convert_rgb=True)}
    log.warning('images are %dx%d, and no processor of transformers resizes and crops to shapes '
                'other than squares as vit_jax does: preprocessor_config.json is not written. '
                'Prepare images as vit_jax.data.images does, with %s.', height, width, ', '.join(
                    f'{name}={value}' for name, value in given.items() if name != 'image_size'))
    return config


def _write_config(weights):
    model = weights.model
    config = dict(
        architectures=['ViTForImageClassification' if weights.num_classes else 'ViTModel'],
        model_type='vit', **{theirs: model[ours] for ours, theirs in _SIZES.items()},
        hidden_act={'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh'}[model['gelu']],
        layer_norm_eps=model['layer_norm_epsilon'], qkv_bias=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        image_size=_int_or_pair(weights.image_size()), patch_size=_int_or_pair(model['patch_size']),
        num_channels=weights.channels())
    if weights.num_classes:
        classes = weights.classes or [f'LABEL_{k}' for k in range(weights.num_classes)]
        config |= dict(id2label=dict(enumerate(classes)),
                       label2id={name: k for k, name in enumerate(classes)})
    elif model['representation_size']:
        config |= dict(pooler_output_size=model['representation_size'], pooler_act='tanh')
    return config


def _int_or_pair(size):
    height, width = as_pair(size)
    return height if height == width else [height, width]


LAYOUT = Layout(
    mark=r'(vit\.)?embeddings\.patch_embeddings\.projection\.weight', suffixes=('',), read=_read,
    table=lambda model: _TABLE, allowed_values=lambda model, path: PLAIN | dict(resnet=(None,)),
    refusals=_refusals, sidecars=_sidecars, finish=lambda arrays, weights: {
        # Without a head, names are those of a ViTModel.
        name if weights.num_classes else name.removeprefix('vit.'): x
        for name, x in arrays.items()})
