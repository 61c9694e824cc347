"""transformers' ViTForImageClassification, or ViTModel without a head: a directory.

Names changed with version 5, which reads and writes the older ones too; those are written.
"""

import logging

from vit_jax.errors import UserError
from vit_jax.models.vit import as_pair
from vit_jax.weights.table import Entry, torch_conv, torch_dense, torch_heads, torch_norm

log = logging.getLogger(__name__)

MARK = r'(vit\.)?embeddings\.patch_embeddings\.projection\.weight'
SUFFIXES = ('',)
_GELU = {'gelu': 'erf', 'gelu_pytorch_tanh': 'tanh', 'gelu_new': 'tanh', 'gelu_fast': 'tanh'}
_RESAMPLE = {0: 'nearest', 1: 'lanczos3', 2: 'bilinear', 3: 'bicubic', 4: 'area'}  # Pillow's


def _blocks(theirs, attention, names, out, first, second):
    ours = 'blocks/{i}'
    heads = [entry for name, other in zip(('query', 'key', 'value'), names, strict=True)
             for entry in torch_heads(f'{ours}/attention', f'{theirs}.{attention}.{other}.', name)]
    return [*torch_norm(f'{ours}/norm1', f'{theirs}.layernorm_before'), *heads,
            *torch_dense(f'{ours}/attention/out', f'{theirs}.{out}', 'from_heads'),
            *torch_norm(f'{ours}/norm2', f'{theirs}.layernorm_after'),
            *torch_dense(f'{ours}/mlp/dense1', f'{theirs}.{first}'),
            *torch_dense(f'{ours}/mlp/dense2', f'{theirs}.{second}')]


_TABLE = [
    Entry(('cls',), 'vit.embeddings.cls_token'),
    Entry(('position/embedding',), 'vit.embeddings.position_embeddings'),
    *torch_conv('embedding', 'vit.embeddings.patch_embeddings.projection'),
    *_blocks('vit.encoder.layer.{i}', 'attention.attention', ('query', 'key', 'value'),
             'attention.output.dense', 'intermediate.dense', 'output.dense'),
    *torch_norm('norm', 'vit.layernorm'),
    *torch_dense('pre_logits', 'vit.pooler.dense'),
    *torch_dense('head', 'classifier')]
_NEWER = _blocks('vit.layers.{i}', 'attention', ('q_proj', 'k_proj', 'v_proj'),
                 'attention.o_proj', 'mlp.fc1', 'mlp.fc2')


def table(model: dict) -> list[Entry]:
    """What an array is called."""
    return _TABLE


def prepare(arrays: dict, sidecars: dict) -> tuple[dict, list[Entry]]:
    """The arrays as in a model with a head, without a pooler that it does not use."""
    prefix = '' if any(name.startswith('vit.') for name in arrays) else 'vit.'
    arrays = {name if name.startswith('classifier.') else prefix + name: x
              for name, x in arrays.items()}
    if 'classifier.weight' in arrays:
        arrays = {name: x for name, x in arrays.items() if not name.startswith('vit.pooler.')}
    return arrays, _TABLE + _NEWER


def known(arrays: dict, sidecars: dict) -> tuple[dict, list | None, dict | None]:
    """What config.json and preprocessor_config.json say.

    An image that is to be squeezed into a square is cropped to one here.
    """
    config = sidecars.get('config.json', {})
    if config.get('model_type') != 'vit':
        raise UserError('weights of transformers need the config.json that belongs to them beside '
                        f'them, with model_type vit; found {config.get("model_type")!r}.')
    sizes = {'hidden_size': 'hidden_size', 'num_layers': 'num_hidden_layers',
             'mlp_dim': 'intermediate_size'}
    fields = {ours: config[theirs] for ours, theirs in sizes.items() if theirs in config}
    fields |= dict(gelu=_GELU.get(config.get('hidden_act', 'gelu'), config.get('hidden_act')),
                  layer_norm_epsilon=config.get('layer_norm_eps', 1e-12),
                  num_heads=config.get('num_attention_heads', 12))
    labels = {int(k): name for k, name in config.get('id2label', {}).items()}
    classes = [labels[k] for k in sorted(labels)]
    unnamed = classes == [f'LABEL_{k}' for k in range(len(classes))]
    preprocess = dict(image_size=as_pair(config.get('image_size', 224)))
    given = sidecars.get('preprocessor_config.json')
    return fields, None if unnamed else classes, preprocess | (_preprocess(given) if given else {})


def _preprocess(given):
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


def holds(model: dict, path: str) -> dict[str, tuple]:
    """Values of fields that the layout can hold."""
    return dict(resnet=(None,), position=('learned_1d',), pool=('cls',), layer_scale_init=(0.0,))


def finish(arrays: dict, weights) -> tuple[dict, dict]:
    """The arrays, and the JSON files beside them; without a head they are those of a ViTModel.

    Raises UserError for a hidden layer of the head, which transformers has in no classifier.
    """
    model, headless = weights.model, weights.num_classes == 0
    if model['representation_size'] and not headless:
        raise UserError(f'model.representation_size is {model["representation_size"]}: '
                        'ViTForImageClassification has no hidden layer before its head.')
    if headless:
        arrays = {name.removeprefix('vit.'): x for name, x in arrays.items()}
    files = {'config.json': lambda: _write_config(weights)}
    height, width = weights.image_size()
    if {'resize', 'crop_ratio', 'mean', 'std'} <= (weights.preprocess or {}).keys():
        if height == width:
            files['preprocessor_config.json'] = lambda: _write_preprocess(weights)
        else:
            log.warning('images are %dx%d, and no processor of transformers resizes and crops to '
                        'what is no square as it is done here: no preprocessor_config.json is '
                        'written. Prepare images for it as vit_jax.data.images does, with %s.',
                        height, width, ', '.join(f'{name}={value}' for name, value in
                                         weights.preprocess.items() if name != 'image_size'))
    return arrays, files


def _write_config(weights):
    model = weights.model
    classes = weights.classes or [f'LABEL_{k}' for k in range(weights.num_classes)]
    act = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh'}[model['gelu']]
    config = dict(
        architectures=['ViTForImageClassification' if weights.num_classes else 'ViTModel'],
        model_type='vit', hidden_size=model['hidden_size'], num_hidden_layers=model['num_layers'],
        num_attention_heads=model['num_heads'], intermediate_size=model['mlp_dim'],
        hidden_act=act, layer_norm_eps=model['layer_norm_epsilon'], qkv_bias=True,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        image_size=_int_or_pair(weights.image_size()), patch_size=_int_or_pair(model['patch_size']),
        num_channels=weights.channels())
    if weights.num_classes:
        config |= dict(id2label=dict(enumerate(classes)),
                       label2id={name: k for k, name in enumerate(classes)})
    elif model['representation_size']:
        config |= dict(pooler_output_size=model['representation_size'], pooler_act='tanh')
    return config


def _write_preprocess(weights):
    """For a square: CLIP's processor keeps the aspect ratio, cuts out the middle, as ours does."""
    given = weights.preprocess
    side, _ = weights.image_size()
    return dict(
        image_processor_type='CLIPImageProcessor', do_resize=True,
        size=dict(shortest_edge=round(side / given['crop_ratio'])),
        resample={name: k for k, name in _RESAMPLE.items()}[given['resize']],
        do_center_crop=True, crop_size=dict(height=side, width=side), do_rescale=True,
        rescale_factor=1 / 255, do_normalize=True, image_mean=given['mean'],
        image_std=given['std'], do_convert_rgb=True)


def _int_or_pair(size):
    height, width = as_pair(size)
    return height if height == width else [height, width]
