"""This project's own: the workdir of a run, and a single .safetensors file.

The file has our parameters as model.init names them, and everything else of Weights as JSON in its
metadata.
"""

import json
import os
from typing import Annotated

import msgspec
from msgspec import Meta

from vit_jax.errors import UserError
from vit_jax.weights import sidecars
from vit_jax.weights.layout import Layout, Reading
from vit_jax.weights.model import Weights, with_defaults
from vit_jax.weights.sidecars import Deviations, Epsilon, Layers, Means, Ratio, Sides, Size
from vit_jax.workdir import checkpoint, record

_KEY = 'vit_jax'


class _Resnet(msgspec.Struct):
    units: Annotated[list[Layers], Meta(max_length=8)]
    width: Size
    preactivation: bool
    fixed_padding: bool
    num_groups: Size
    group_norm_epsilon: Epsilon
    weight_epsilon: Epsilon
    weight_epsilon_on: str


class _Model(msgspec.Struct):
    """Kinds and limits alone: which fields a model has, and how they fit, models.build checks."""

    resnet: _Resnet | None = None
    patch_size: Sides = 1
    hidden_size: Size = 1
    num_layers: Layers = 1
    mlp_dim: Size = 1
    num_heads: Size = 1
    representation_size: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    attention: str = ''
    pool: str = ''
    position: str = ''
    position_at: str = ''
    gelu: str = ''
    dtype: str = ''
    remat_policy: str = ''
    unroll: Layers = 1
    stochastic_depth_rate: Epsilon = 0.0
    dropout_rate: Epsilon = 0.0
    attention_dropout_rate: Epsilon = 0.0
    layer_norm_epsilon: Epsilon = 0.0
    layer_scale_init: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    head_bias_init: Annotated[float, Meta(ge=-1000, le=1000)] = 0.0


class _Preprocess(msgspec.Struct):
    image_size: Sides | None = None
    resize: str | None = None
    crop_ratio: Ratio | None = None
    mean: Means | None = None
    std: Deviations | None = None


class _Stated(msgspec.Struct):
    """What the metadata holds."""

    model: _Model
    num_classes: Annotated[int, Meta(ge=0, le=10_000_000)]
    classes: list[str] | None
    preprocess: _Preprocess | None


_FIELDS = _Stated.__struct_fields__


def from_run(workdir: str, step: int | None) -> Weights:
    """Parameters of a checkpoint, the newest readable one by default; averaged if the run averages.

    Raises UserError if no checkpoint can be read, or not the files that belong to it.
    """
    config, classes = record.read(workdir)
    params, step = checkpoint.load_params(workdir, step)
    preprocess = {'image_size': config['image_size'], **config['preprocess']}
    return Weights(params, with_defaults(_tuples(config['model'])),
                   config['dataset']['num_classes'], classes, _tuples(preprocess), 'workdir',
                   os.path.join(record.checkpoint_directory(workdir), str(step)))


def _read(contents):
    where = 'the metadata of the file'
    if _KEY not in contents.metadata:
        raise UserError('the file has the arrays of a vit_jax model but not its fields, which '
                        'belong in the metadata: write it again with weights.save.')
    raw = sidecars.parse(contents.metadata[_KEY], where)
    stated = sidecars.checked(_Stated, raw, where)
    return Reading(contents.arrays, with_defaults(_tuples(raw['model'])), (), stated.num_classes,
                   stated.classes, _tuples(raw['preprocess']))


def _tuples(value):
    """JSON's lists as the tuples they were."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


LAYOUT = Layout(mark=r'blocks/.+|resnet/root_conv/kernel', suffixes=('.safetensors',), read=_read,
                native=True, metadata=lambda weights: {
                    _KEY: json.dumps({name: getattr(weights, name) for name in _FIELDS})})
