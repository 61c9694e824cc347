"""transformers' ViTForImageClassification, or ViTModel without a head: a directory.

Version 5 of transformers has new names. Files are written with the older names, which version 5
also reads.
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
from vit_jax.weights.model import Weights
from vit_jax.weights.sidecars import Deviations, Epsilon, Layers, Means, Ratio, Sides, Size
from vit_jax.weights.table import entries, torch_modules

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
_WRITTEN_GELU = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}
_LOSSES = {'multi_label_classification': 'sigmoid', 'single_label_classification': 'softmax'}
_RESAMPLE = {0: 'nearest', 1: 'lanczos3', 2: 'bilinear', 3: 'bicubic', 4: 'box'}  # Pillow's


class _Config(msgspec.Struct):
    """config.json with the defaults of transformers; arrays show the sizes that are None here."""

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
    """preprocessor_config.json; some versions of transformers write sizes as plain numbers."""

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


_BLOCK = ('blocks/{i}/', 'vit.encoder.layer.{i}.')
_TABLE = [
    *entries(
        {
            'cls': 'vit.embeddings.cls_token',
            'position/embedding': 'vit.embeddings.position_embeddings',
        }
    ),
    *torch_modules(
        {
            'embedding': 'vit.embeddings.patch_embeddings.projection',
            'norm': 'vit.layernorm',
            'pre_logits': 'vit.pooler.dense',
            'head': 'classifier',
        }
    ),
    *torch_modules(
        {
            'norm1': 'layernorm_before',
            'attention/query': 'attention.attention.query',
            'attention/key': 'attention.attention.key',
            'attention/value': 'attention.attention.value',
            'attention/out': 'attention.output.dense',
            'norm2': 'layernorm_after',
            'mlp/dense1': 'intermediate.dense',
            'mlp/dense2': 'output.dense',
        },
        within=_BLOCK,
    ),
]
_NEWER = torch_modules(
    {
        'norm1': 'layernorm_before',
        'attention/query': 'attention.q_proj',
        'attention/key': 'attention.k_proj',
        'attention/value': 'attention.v_proj',
        'attention/out': 'attention.o_proj',
        'norm2': 'layernorm_after',
        'mlp/dense1': 'mlp.fc1',
        'mlp/dense2': 'mlp.fc2',
    },
    within=('blocks/{i}/', 'vit.layers.{i}.'),
)


def _read(contents):
    """Reads the arrays, config.json (fields) and preprocessor_config.json (image preparation)."""
    raw = contents.sidecars.get('config.json', {})
    if raw.get('model_type') != 'vit':
        raise UserError(
            'weights of transformers need their own config.json in the same directory, '
            f'with model_type vit; found {raw.get("model_type")!r:.80}.',
            kind='choice',
            field='model_type',
            value=raw.get('model_type'),
        )
    config = sidecars.checked(_Config, raw, 'config.json')
    arrays = _read_arrays(contents.arrays)
    if 'vit.pooler.dense.weight' in arrays:
        check_choice('pooler_act in config.json', config.pooler_act, ('tanh',))
    preprocess = dict(image_size=as_pair(config.image_size))
    processor = contents.sidecars.get('preprocessor_config.json')
    if processor:
        preprocess |= _read_processor(processor)
    return Reading(
        arrays,
        _read_fields(config),
        _TABLE + _NEWER,
        classes=_classes(config.id2label or {}),
        preprocess=preprocess,
        loss=_LOSSES.get(config.problem_type),
    )


def _read_arrays(arrays):
    """Arrays with the names of ViTForImageClassification, without a pooler that no head uses."""
    is_vit_model = not any(name.startswith('vit.') for name in arrays)
    has_head = 'classifier.weight' in arrays
    renamed = {}
    for name, x in arrays.items():
        if is_vit_model and not name.startswith('classifier.'):
            name = f'vit.{name}'
        if not (has_head and name.startswith('vit.pooler.')):
            renamed[name] = x
    return renamed


def _read_fields(config):
    """Fields of the model that config.json states."""
    check_choice('hidden_act in config.json', config.hidden_act, _GELU)
    fields = dict(gelu=_GELU[config.hidden_act], layer_norm_epsilon=config.layer_norm_eps)
    for ours, theirs in _SIZES.items():
        value = getattr(config, theirs)
        if value:
            fields[ours] = value
    return fields


def _classes(labels):
    """The class names in the order of their numbers; None if transformers made them up."""
    if labels.keys() != set(range(len(labels))):
        raise UserError(
            f'config.json: id2label names {len(labels)} classes, but not the classes 0 '
            f'to {len(labels) - 1}.',
            kind='content',
            field='id2label',
        )
    classes = [labels[k] for k in range(len(labels))]
    if classes == _numbered_names(len(classes)):
        return None
    return classes


def _numbered_names(num_classes):
    """Names that transformers gives to classes without names."""
    return [f'LABEL_{k}' for k in range(num_classes)]


def _read_processor(raw):
    """The fields of `config.preprocess` that preprocessor_config.json states."""
    processor = sidecars.checked(_Processor, raw, 'preprocessor_config.json')
    side = _side(processor.size)
    crop = _side(processor.crop_size) if processor.do_center_crop else 0
    _check_processor(processor, raw, side, crop)
    mean, std = _mean_and_std(processor)
    values = dict(
        resize=_RESAMPLE.get(processor.resample),
        mean=mean,
        std=std,
        crop_ratio=crop / side if crop and side else 1.0,
        fit='transformers' if _keeps_shape(processor) else 'squash',
        antialias=True,
        uint8_resize=True,
    )
    return {name: value for name, value in values.items() if value}


def _check_processor(processor, raw, side, crop):
    """Raises UserError if the processor does something that vit_jax does not do."""
    impossible = {
        'do_resize': processor.do_resize is False,
        'do_pad': processor.do_pad,
        'do_flip_channel_order': processor.do_flip_channel_order,
        'crop_pct': processor.crop_pct,
        'crop_size': side and crop > side,
    }
    for name, is_used in impossible.items():
        if is_used:
            raise UserError(
                f'preprocessor_config.json: {name} is {sidecars.shown(raw[name])}, which vit_jax '
                'does not do. The weights load without that file; describe the preparation of '
                'images with --preprocess.',
                kind='inapplicable',
                field=name,
                value=raw[name],
            )


def _keeps_shape(processor):
    """Whether photos keep their shape when they are resized.

    If the size is one number or missing, CLIP's processor resizes the shortest edge to it, and
    ViT's processor resizes both sides.
    """
    if isinstance(processor.size, _Size):
        return bool(processor.size.shortest_edge)
    is_clip = 'CLIP' in (processor.image_processor_type or '')
    return is_clip and not isinstance(processor.size, list)


def _mean_and_std(processor):
    """Mean and deviation of pixels / 255; () where the processor does not state them.

    With scale = 255 * factor, (x * factor - mean) / std equals (x / 255 - mean / scale) / (std /
    scale).
    """
    scale = 255.0
    if processor.do_rescale is not False:
        scale = 255 * processor.rescale_factor
    mean = processor.image_mean or ()
    std = processor.image_std or ()
    if processor.do_normalize is False:
        mean = (0.0, 0.0, 0.0)
        std = (1.0, 1.0, 1.0)
    return tuple(x / scale for x in mean), tuple(x / scale for x in std)


def _side(size):
    """The larger side of a size in any notation of processors; 0 if there is no size."""
    if isinstance(size, _Size):
        size = [size.shortest_edge or 0, size.height or 0, size.width or 0]
    if isinstance(size, list):
        return max(size)
    return size or 0


def _refusals(weights, path):
    size = weights.model['representation_size']
    if not (size and weights.num_classes):
        return []
    return [
        f'model.representation_size is {size}: ViTForImageClassification has no hidden layer '
        'before its head'
    ]


def _write_sidecars(weights):
    written = {'config.json': _write_config(weights)}
    preprocess = weights.preprocess or {}
    if {'fit', 'crop_ratio', 'resize', 'mean', 'std'} <= preprocess.keys():
        processor = _write_processor(weights, preprocess)
        if processor:
            written['preprocessor_config.json'] = processor
    return written


def has_processor(weights: Weights) -> bool:
    """Whether transformers has a processor for the images; `preprocess` states how they fit.

    Processors that keep the shape of a photo give squares only.
    """
    height, width = weights.image_size()
    return (weights.preprocess or {}).get('fit') == 'squash' or height == width


def _write_processor(weights, preprocess):
    """The content of preprocessor_config.json; None, with a warning, if no processor fits."""
    height, width = weights.image_size()
    target = resizing.target_size((height, width), preprocess)
    if not has_processor(weights):
        log.warning(
            'Images are %dx%d: processors of transformers that keep the shape of a photo give '
            'squares only. preprocessor_config.json is not written. Prepare images as '
            'vit_jax.data.images does, with %s.',
            height,
            width,
            published.words(preprocess),
        )
        return None
    if preprocess['fit'] == 'squash':
        size = dict(height=target[0], width=target[1])
    else:
        size = dict(shortest_edge=target[0])
    description.log_other_pixels(weights, 'transformers')
    resample = {name: number for number, name in _RESAMPLE.items()}
    processor = dict(
        image_processor_type='CLIPImageProcessor',
        do_resize=True,
        size=size,
        resample=resample[preprocess['resize'].replace('area', 'box')],
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=preprocess['mean'],
        image_std=preprocess['std'],
        do_convert_rgb=True,
    )
    if preprocess['fit'] == 'squash' and preprocess['crop_ratio'] == 1:
        processor['image_processor_type'] = 'ViTImageProcessor'
    else:
        processor |= dict(do_center_crop=True, crop_size=dict(height=height, width=width))
    return processor


def _write_config(weights):
    model = weights.model
    config = dict(
        architectures=['ViTForImageClassification' if weights.num_classes else 'ViTModel'],
        model_type='vit',
        **{theirs: model[ours] for ours, theirs in _SIZES.items()},
        hidden_act=_WRITTEN_GELU[model['gelu']],
        layer_norm_eps=model['layer_norm_epsilon'],
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=_int_or_pair(weights.image_size()),
        patch_size=_int_or_pair(model['patch_size']),
        num_channels=weights.channels(),
    )
    if weights.num_classes:
        classes = weights.classes or _numbered_names(weights.num_classes)
        config['id2label'] = dict(enumerate(classes))
        config['label2id'] = {name: k for k, name in enumerate(classes)}
        if weights.loss == 'sigmoid':  # programs assume softmax unless it is stated
            config['problem_type'] = 'multi_label_classification'
    elif model['representation_size']:
        config |= dict(pooler_output_size=model['representation_size'], pooler_act='tanh')
    return config


def _int_or_pair(size):
    height, width = as_pair(size)
    return height if height == width else [height, width]


def _finish(arrays, weights):
    """Renames the arrays of a model without a head to the names of a ViTModel."""
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
    sidecars=_write_sidecars,
    finish=_finish,
)
