"""This project's own: the workdir of a run, and a single .safetensors file.

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

_KEY = 'vit_jax'


# By the kind of a default: the values that a field of a model may have. Which fields there are,
# and how they fit together, models.build checks.
_KINDS = {
    bool: bool,
    int: Annotated[int, Meta(ge=0, le=1_000_000)],
    str: str,
    tuple: Sides,
    float: Annotated[float, Meta(ge=-1000, le=1000)],
}


def _schema(fields):
    return msgspec.defstruct(
        '_Fields', [(name, _KINDS[type(x)], x) for name, x in fields.items() if type(x) in _KINDS]
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


class _Stated(msgspec.Struct):
    """What the metadata holds."""

    model: _Model
    num_classes: Annotated[int, Meta(ge=0, le=10_000_000)]
    classes: list[str] | None
    preprocess: _Preprocess | None
    loss: Literal['softmax', 'sigmoid'] | None = None


_FIELDS = _Stated.__struct_fields__
# What was done before the config had these fields.
_OLDER = dict(fit='cover', antialias=True, uint8_resize=False)


def from_run(workdir: str, step: int | None) -> Weights:
    """Parameters of a checkpoint, see saved_params.load_params; averaged if the run averages.

    Raises UserError if no checkpoint can be read, or not the files that belong to it.
    """
    config, class_names = record.read(workdir)
    from vit_jax.workdir import saved_params  # here, because Orbax is slow to import

    params, step = saved_params.load_params(workdir, step)
    check_choice(
        f'loss.name in {workdir}/{record.CONFIG}',
        config['loss'].get('name'),
        config_lib.FIELDS['loss.name'].values.choices,
    )
    preprocess = {'image_size': config['image_size'], **_OLDER, **config['preprocess']}
    num_classes = config['dataset']['num_classes']
    classes: list[str] | None = class_names
    if config.get('masked', {}).get('target', 'none') != 'none':  # which has no head
        params, num_classes, classes = params['vit'], 0, None
    return Weights(
        params,
        with_defaults(_tuples(config['model'])),
        num_classes,
        classes,
        _tuples(preprocess),
        'workdir',
        os.path.join(record.checkpoint_directory(workdir), str(step)),
        config['loss']['name'],
    )


def _read(contents):
    where = 'the metadata of the file'
    if _KEY not in contents.metadata:
        raise UserError(
            'the file has the arrays of a vit_jax model but not its fields, which '
            'belong in the metadata: write it again with weights.save.'
        )
    raw = sidecars.parse(contents.metadata[_KEY], where)
    stated = sidecars.checked(_Stated, raw, where)
    preprocess = raw['preprocess'] and _OLDER | {
        name: as_pair(value) if name == 'image_size' else value
        for name, value in _tuples(raw['preprocess']).items()
        if value is not None
    }
    return Reading(
        contents.arrays,
        with_defaults(_tuples(raw['model'])),
        (),
        stated.num_classes,
        stated.classes,
        preprocess,
        stated.loss,
    )


def _tuples(value):
    """JSON's lists as the tuples they were."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


LAYOUT = Layout(
    mark=r'blocks/.+|resnet/root_conv/kernel',
    suffixes=('.safetensors',),
    read=_read,
    native=True,
    metadata=lambda weights: {_KEY: json.dumps({name: getattr(weights, name) for name in _FIELDS})},
)
