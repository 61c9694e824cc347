"""transformers' ViTForImageClassification, or ViTModel without a head: a directory.

Version 5 of transformers has new names, but reads the older ones too, which are written here.
"""

import logging
from typing import Annotated

import msgspec
from msgspec import Meta

from vit_jax.data import resizing
from vit_jax.errors import UserError, check_choice
from vit_jax.models.vit import as_pair
from vit_jax.weights import description, published, sidecars
from vit_jax.weights.layout import PLAIN, Layout, Reading
from vit_jax.weights.sidecars import Deviations, Epsilon, Layers, Means, Ratio, Sides, Size
from vit_jax.weights.table import Entry, torch_modules

log = logging.getLogger(__name__)

_SIZES = {
    'hidden_size': 'hidden_size',
    'num_layers': 'num_hidden_layers',
    'num_heads': 'num_attention_heads',
    'mlp_dim': 'intermediate_size',
}
_GELU = {
    'gelu': 'erf',
    'gelu_pytorch_tanh': 'tanh',
    'gelu_new': 'tanh',
    'gelu_fast': 'tanh',
    'quick_gelu': 'quick',
}
_LOSSES = {'multi_label_classification': 'sigmoid', 'single_label_classification': 'softmax'}
_RESAMPLE = {0: 'nearest', 1: 'lanczos3', 2: 'bilinear', 3: 'bicubic', 4: 'box'}  # Pillow's


class _Config(msgspec.Struct):
    """config.json with transformers' defaults; sizes that it does not state, arrays show."""

    hidden_size: Size | None = None
    num_hidden_layers: Layers | None = None
    num_attention_heads: Size = 12
    intermediate_size: Size | None = None
    hidden_act: str = 'gelu'
    layer_norm_eps: Epsilon = 1e-12
    image_size: Sides = 224
    pooler_act: str | None = 'tanh'
    id2label: dict[int, str] | None = None
    problem_type: str | None = None


class _Size(msgspec.Struct):
    shortest_edge: Size | None = None
    height: Size | None = None
    width: Size | None = None


class _Processor(msgspec.Struct):
    """preprocessor_config.json; versions of transformers write a size as numbers or by name."""

    image_processor_type: str | None = None
    do_resize: bool | None = None
    size: Sides | _Size | None = None
    resample: Annotated[int, Meta(ge=0, le=4)] | None = None
    do_center_crop: bool | None = None
    crop_size: Sides | _Size | None = None
    do_rescale: bool | None = None
    rescale_factor: Annotated[float, Meta(gt=0, le=1000)] = 1 / 255
    do_normalize: bool | None = None
    image_mean: Means | None = None
    image_std: Deviations | None = None
    do_pad: bool | None = None
    do_flip_channel_order: bool | None = None
    crop_pct: Ratio | None = None


_BLOCK = 'blocks/{i}'
_THEIRS = 'vit.encoder.layer.{i}'
_THEIRS_NEWER = 'vit.layers.{i}'
_TABLE = [
    Entry(('cls',), 'vit.embeddings.cls_token'),
    Entry(('position/embedding',), 'vit.embeddings.position_embeddings'),
    *torch_modules(
        {
            'embedding': 'vit.embeddings.patch_embeddings.projection',
            f'{_BLOCK}/norm1': f'{_THEIRS}.layernorm_before',
            **{
                f'{_BLOCK}/attention/{name}': f'{_THEIRS}.attention.attention.{name}'
                for name in ('query', 'key', 'value')
            },
            f'{_BLOCK}/attention/out': f'{_THEIRS}.attention.output.dense',
            f'{_BLOCK}/norm2': f'{_THEIRS}.layernorm_after',
            f'{_BLOCK}/mlp/dense1': f'{_THEIRS}.intermediate.dense',
            f'{_BLOCK}/mlp/dense2': f'{_THEIRS}.output.dense',
            'norm': 'vit.layernorm',
            'pre_logits': 'vit.pooler.dense',
            'head': 'classifier',
        }
    ),
]
_NEWER = torch_modules(
    {
        f'{_BLOCK}/{ours}': f'{_THEIRS_NEWER}.{theirs}'
        for ours, theirs in {
            'norm1': 'layernorm_before',
            'attention/query': 'attention.q_proj',
            'attention/key': 'attention.k_proj',
            'attention/value': 'attention.v_proj',
            'attention/out': 'attention.o_proj',
            'norm2': 'layernorm_after',
            'mlp/dense1': 'mlp.fc1',
            'mlp/dense2': 'mlp.fc2',
        }.items()
    }
)


def _read(contents):
    """Fields are in config.json, the preparation of images in preprocessor_config.json.

    A pooler that the head does not use is dropped.
    """
    raw = contents.sidecars.get('config.json', {})
    if raw.get('model_type') != 'vit':
        raise UserError(
            'weights of transformers need their own config.json in the same directory, '
            f'with model_type vit; found {raw.get("model_type")!r:.80}.'
        )
    config = sidecars.checked(_Config, raw, 'config.json')
    prefix = '' if any(name.startswith('vit.') for name in contents.arrays) else 'vit.'
    arrays = {
        name if name.startswith('classifier.') else prefix + name: x
        for name, x in contents.arrays.items()
    }
    if 'classifier.weight' in arrays:
        arrays = {name: x for name, x in arrays.items() if not name.startswith('vit.pooler.')}
    elif 'vit.pooler.dense.weight' in arrays:
        check_choice('pooler_act in config.json', config.pooler_act, ('tanh',))
    check_choice('hidden_act in config.json', config.hidden_act, _GELU)
    fields = dict(gelu=_GELU[config.hidden_act], layer_norm_epsilon=config.layer_norm_eps)
    for ours, theirs in _SIZES.items():
        value = getattr(config, theirs)
        if value:
            fields[ours] = value
    preprocess = dict(image_size=as_pair(config.image_size))
    processor = contents.sidecars.get('preprocessor_config.json')
    if processor:
        preprocess |= _read_processor(processor)
    return Reading(
        arrays,
        fields,
        _TABLE + _NEWER,
        classes=_classes(config.id2label or {}),
        preprocess=preprocess,
        loss=_LOSSES.get(config.problem_type),
    )


def _classes(labels):
    """Names in the order of their numbers; None if they are only numbered."""
    if labels.keys() != set(range(len(labels))):
        raise UserError(
            f'config.json: id2label names {len(labels)} classes, but not those from 0 '
            f'to {len(labels) - 1}.'
        )
    classes = [labels[k] for k in range(len(labels))]
    return None if classes == [f'LABEL_{k}' for k in range(len(classes))] else classes


def _read_processor(raw):
    """The fields of `config.preprocess` that preprocessor_config.json states."""
    given = sidecars.checked(_Processor, raw, 'preprocessor_config.json')
    side = _side(given.size)
    crop = _side(given.crop_size) if given.do_center_crop else 0
    _check_processor(given, raw, side, crop)
    mean, std = _mean_and_std(given)
    values = dict(
        resize=_RESAMPLE.get(given.resample),
        mean=mean,
        std=std,
        crop_ratio=crop / side if crop and side else 1.0,
        fit='transformers' if _keeps_shape(given) else 'squash',
        antialias=True,
        uint8_resize=True,
    )
    return {name: value for name, value in values.items() if value}


def _check_processor(given, raw, side, crop):
    """Raises UserError for what a processor does and cannot be done here."""
    impossible = {
        'do_resize': given.do_resize is False,
        'do_pad': given.do_pad,
        'do_flip_channel_order': given.do_flip_channel_order,
        'crop_pct': given.crop_pct,
        'crop_size': side and crop > side,
    }
    for name, is_asked_for in impossible.items():
        if is_asked_for:
            raise UserError(
                f'preprocessor_config.json: {name} is {sidecars.shown(raw[name])}, which cannot be '
                'done here. Without that file the weights can be loaded; then say by '
                '--preprocess how images are prepared.'
            )


def _keeps_shape(given):
    """Whether photos keep their shape when they are resized.

    A size that is a number, or none at all, is the shortest edge for CLIP's processor, and both
    sides for ViT's.
    """
    if isinstance(given.size, _Size):
        return bool(given.size.shortest_edge)
    is_clip = 'CLIP' in (given.image_processor_type or '')
    return is_clip and not isinstance(given.size, list)


def _mean_and_std(given):
    """Mean and deviation of x / 255; () where the processor does not state them.

    x * factor - mean in units of std is x / 255 - mean / scale in units of std / scale.
    """
    scale = 255.0
    if given.do_rescale is not False:
        scale = 255 * given.rescale_factor
    mean = given.image_mean
    std = given.image_std
    if given.do_normalize is False:
        mean = (0.0, 0.0, 0.0)
        std = (1.0, 1.0, 1.0)
    return tuple(x / scale for x in mean or ()), tuple(x / scale for x in std or ())


def _side(size):
    """The larger side of a size as processors write it, 0 if they write none."""
    if isinstance(size, _Size):
        size = [size.shortest_edge or 0, size.height or 0, size.width or 0]
    return max(size) if isinstance(size, list) else size or 0


def _refusals(weights, path):
    size = weights.model['representation_size']
    if not (size and weights.num_classes):
        return []
    return [
        f'model.representation_size is {size}: ViTForImageClassification has no hidden layer '
        'before its head'
    ]


def _sidecars(weights):
    config = {'config.json': _write_config(weights)}
    given = weights.preprocess or {}
    if not {'fit', 'crop_ratio', 'resize', 'mean', 'std'} <= given.keys():
        return config
    height, width = weights.image_size()
    target = resizing.target_size((height, width), given)
    if given['fit'] == 'squash':
        size = dict(zip(('height', 'width'), target, strict=True))
    elif height == width:
        size = dict(shortest_edge=target[0])
    else:
        log.warning(
            'images are %dx%d, and no processor of transformers resizes photos, keeping '
            'their shape, to cover anything but a square: preprocessor_config.json is not '
            'written. Prepare images as vit_jax.data.images does, with %s.',
            height,
            width,
            published.words(given),
        )
        return config
    description.log_other_pixels(weights, 'transformers')
    processor = dict(
        image_processor_type='CLIPImageProcessor',
        do_resize=True,
        size=size,
        resample={name: k for k, name in _RESAMPLE.items()}[given['resize'].replace('area', 'box')],
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=given['mean'],
        image_std=given['std'],
        do_convert_rgb=True,
    )
    if given['fit'] == 'squash' and given['crop_ratio'] == 1:
        processor['image_processor_type'] = 'ViTImageProcessor'
    else:
        processor |= dict(do_center_crop=True, crop_size=dict(height=height, width=width))
    return config | {'preprocessor_config.json': processor}


def _write_config(weights):
    model = weights.model
    config = dict(
        architectures=['ViTForImageClassification' if weights.num_classes else 'ViTModel'],
        model_type='vit',
        **{theirs: model[ours] for ours, theirs in _SIZES.items()},
        hidden_act={'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}[
            model['gelu']
        ],
        layer_norm_eps=model['layer_norm_epsilon'],
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=_int_or_pair(weights.image_size()),
        patch_size=_int_or_pair(model['patch_size']),
        num_channels=weights.channels(),
    )
    if weights.num_classes:
        classes = weights.classes or [f'LABEL_{k}' for k in range(weights.num_classes)]
        config |= dict(
            id2label=dict(enumerate(classes)), label2id={name: k for k, name in enumerate(classes)}
        )
        if weights.loss == 'sigmoid':  # without a word, programs take softmax
            config['problem_type'] = 'multi_label_classification'
    elif model['representation_size']:
        config |= dict(pooler_output_size=model['representation_size'], pooler_act='tanh')
    return config


def _int_or_pair(size):
    height, width = as_pair(size)
    return height if height == width else [height, width]


def _finish(arrays, weights):
    """The names of a ViTModel, where there is no head."""
    if weights.num_classes:
        return arrays
    return {name.removeprefix('vit.'): x for name, x in arrays.items()}


LAYOUT = Layout(
    mark=r'(vit\.)?embeddings\.patch_embeddings\.projection\.weight',
    suffixes=('',),
    read=_read,
    table=lambda model: _TABLE,
    allowed_values=lambda model, path: PLAIN | dict(resnet=(None,)),
    refusals=_refusals,
    sidecars=_sidecars,
    finish=_finish,
)
