"""vit_jax's own layout: the workdir of a run, and a single .safetensors file.

The file has our parameters as model.init names them, and everything else of Weights as JSON in its
metadata.
"""

import json
import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.errors import UserError, check_choice
from vit_jax.models import variants
from vit_jax.models.vit import as_pair
from vit_jax.weights import sidecars
from vit_jax.weights.layout import Layout, Reading
from vit_jax.weights.model import Weights, with_defaults
from vit_jax.weights.sidecars import Deviations, Layers, Means, Ratio, Sides
from vit_jax.workdir import record

_KEY = 'vit_jax'  # in the metadata

# Values that a field of a model may have, by the type of its default. models.build checks the
# names of the fields and whether they fit together.
_TYPES = {
    bool: bool,
    int: Annotated[int, Meta(ge=0, le=1_000_000)],
    str: str,
    tuple: Sides,
    float: Annotated[float, Meta(ge=-1000, le=1000)],
}


def _schema(fields):
    return msgspec.defstruct(
        '_Fields', [(name, _TYPES[type(x)], x) for name, x in fields.items() if type(x) in _TYPES]
    )


class _Resnet(_schema(variants.bit_resnet(()))):  # type: ignore[misc]  # made of the defaults
    units: Annotated[list[Layers], Meta(max_length=8)] = []


class _Model(_schema(models.fields('b16'))):  # type: ignore[misc]  # made of the defaults
    resnet: _Resnet | None = None


class _Preprocess(msgspec.Struct):
    image_size: Sides | None = None
    fit: str | None = None
    crop_ratio: Ratio | None = None
    resize: str | None = None
    antialias: bool | None = None
    uint8_resize: bool | None = None
    mean: Means | None = None
    std: Deviations | None = None


class _Metadata(msgspec.Struct):
    """The JSON object in the metadata; its fields are fields of Weights."""

    model: _Model
    num_classes: Annotated[int, Meta(ge=0, le=10_000_000)]
    classes: list[str] | None
    preprocess: _Preprocess | None
    loss: Literal['softmax', 'sigmoid'] | None = None


# How images were prepared before the config had these fields.
_EARLIER_PREPROCESS = dict(fit='cover', antialias=True, uint8_resize=False)


def from_run(workdir: str, step: int | None) -> Weights:
    """Loads a checkpoint: the averaged parameters if there are any; see saved_params.load_params.

    Raises UserError if no checkpoint can be read, or if the other files of the run cannot be read.
    """
    config, class_names = record.read(workdir)
    from vit_jax.workdir import saved_params  # here, because importing Orbax is slow

    params, step = saved_params.load_params(workdir, step)
    check_choice(
        f'loss.name in {workdir}/{record.CONFIG}',
        config['loss'].get('name'),
        config_lib.FIELDS['loss.name'].values.choices,
    )
    preprocess = {
        'image_size': config['image_size'],
        **_EARLIER_PREPROCESS,
        **config['preprocess'],
    }
    num_classes = config['dataset']['num_classes']
    classes: list[str] | None = class_names
    is_masked = config.get('masked', {}).get('target', 'none') != 'none'
    if is_masked:  # such a run trains a ViT without a head
        params = params['vit']
        num_classes = 0
        classes = None
    return Weights(
        params,
        with_defaults(_with_tuples(config['model'])),
        num_classes,
        classes,
        _with_tuples(preprocess),
        'workdir',
        os.path.join(record.checkpoint_directory(workdir), str(step)),
        config['loss']['name'],
    )


def _read(contents):
    where = 'the metadata of the file'
    if _KEY not in contents.metadata:
        raise UserError(
            'the file has the arrays of a vit_jax model but not its fields, which '
            'belong in the metadata: write it again with weights.save.',
            kind='missing',
        )
    raw = sidecars.parse(contents.metadata[_KEY], where)
    metadata = sidecars.checked(_Metadata, raw, where)
    return Reading(
        contents.arrays,
        with_defaults(_with_tuples(raw['model'])),
        (),
        metadata.num_classes,
        metadata.classes,
        _read_preprocess(raw['preprocess']),
        metadata.loss,
    )


def _read_preprocess(raw):
    """The field `preprocess` of Weights; null stands for a value that the writer did not know."""
    if not raw:
        return raw
    preprocess = dict(_EARLIER_PREPROCESS)
    for name, value in _with_tuples(raw).items():
        if name == 'image_size' and value is not None:
            preprocess[name] = as_pair(value)
        elif value is not None:
            preprocess[name] = value
    return preprocess


def _with_tuples(value):
    """The value with lists converted back to tuples, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _with_tuples(x) for name, x in value.items()}
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return value


def _write_metadata(weights):
    return {
        _KEY: json.dumps({name: getattr(weights, name) for name in _Metadata.__struct_fields__})
    }


LAYOUT = Layout(
    mark=r'blocks/.+|resnet/root_conv/kernel',
    suffixes=('.safetensors',),
    read=_read,
    native=True,
    metadata=_write_metadata,
)
