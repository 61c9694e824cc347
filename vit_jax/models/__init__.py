"""Models.

In: a name of variants.py or the fields of `config.model`. Out: a Flax module from images to logits,
and its cost. Imports errors, fields and plugins, besides JAX and Flax.
"""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn

from vit_jax.errors import UserError
from vit_jax.fields import Field, declared
from vit_jax.models import variants
from vit_jax.models.block_fields import BlockFields
from vit_jax.models.field_names import check_field_names
from vit_jax.models.resnet import Backbone, ResNet
from vit_jax.models.stack import check_images as check_images
from vit_jax.models.vit import ViT

# The fields that the machine may choose, and the value of each that leaves the choice to it.
OPEN = {
    'unroll': 0,
    'remat_policy': 'auto',
    'attention_kernel': 'auto',
    'linear_kernel': 'auto',
    'dtype': 'auto',
}
# The fields that each machine chooses again: weights do not contain them, and a run may resume with
# other values.
PER_MACHINE = ('unroll', 'remat_policy', 'attention_kernel', 'linear_kernel')


def build(model: str | Mapping, num_classes: int, **overrides) -> nn.Module:
    """Builds a model for float32 images [batch, height, width, channels] in [-1, 1].

    Args:
      model: a name from variants.names(), or the fields of `config.model`.
      num_classes: number of logits; 0: the model returns the input of the head's last layer.
      **overrides: fields that differ, for example dtype='bfloat16'; see vit.ViT,
        block_fields.BlockFields and resnet.ResNet.

    Returns:
      A Flax module. `apply({'params': params}, images)` returns logits.

    Raises:
      UserError: the name or a field is unknown, or the fields do not fit together.
    """
    if isinstance(model, str):
        model = variants.get(model)
    family = _family(model)
    values = _with_defaults(family, model) | overrides
    check_field_names('model', values, _fields_of(family))
    if values['dtype'] == OPEN['dtype']:  # only training chooses a dtype for the machine
        values['dtype'] = 'float32'
    if not isinstance(num_classes, int) or num_classes < 0:
        raise UserError(
            f'num_classes is {num_classes}: expected a whole number, 0 for no head.',
            kind='value',
            field='num_classes',
            value=num_classes,
        )
    if values['resnet'] is not None:
        values['resnet'] = dict(values['resnet'])
    if family is ViT:
        block_values = {f.name: values.pop(f.name) for f in dataclasses.fields(BlockFields)}
        values['fields'] = BlockFields(**block_values)
    module = family(num_classes=num_classes, **values)
    module.check()
    return module


def fields(name: str) -> dict:
    """Returns all fields of a named model, the first value of `config.model`."""
    model = variants.get(name)
    return _with_defaults(_family(model), model)


def tables() -> dict[str, dict[str, Field]]:
    """Returns the fields of `config.model`, by the models that have them."""
    return {
        'transformers': declared(ViT, BlockFields, prefix='model.'),
        'ResNets': declared(ResNet, prefix='model.'),
        'ResNets and hybrids': declared(Backbone, prefix='model.resnet.'),
    }


def _family(model):
    """The class that has the fields of `model`."""
    is_transformer = 'hidden_size' in model or not model.get('resnet')
    return ViT if is_transformer else ResNet


def _fields_of(family):
    """The dataclass fields of `config.model` for a class, by name."""
    classes = (ViT, BlockFields) if family is ViT else (ResNet,)
    set_by_build = ('num_classes', 'fields', 'parent', 'name')
    config_fields = {}
    for owner in classes:
        for field in dataclasses.fields(owner):
            if field.name not in set_by_build:
                config_fields[field.name] = field
    return config_fields


def _with_defaults(family, model):
    """The values of `model`, and defaults for its other fields that have one."""
    values = {}
    for name, field in _fields_of(family).items():
        if field.default is not dataclasses.MISSING:
            values[name] = field.default
    return values | dict(model)
