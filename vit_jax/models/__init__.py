"""Models.

In: a name of variants.py or the fields of `config.model`. Out: a Flax module from images to logits,
and what it costs. Imports errors, fields and plugins, besides JAX and Flax.
"""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn

from vit_jax.errors import UserError
from vit_jax.fields import Field, declared
from vit_jax.models import variants
from vit_jax.models.encoder import BlockFields
from vit_jax.models.field_names import check_field_names
from vit_jax.models.resnet import Backbone, ResNet
from vit_jax.models.stack import check_images as check_images
from vit_jax.models.vit import ViT

# The fields that may be left to the machine, each with the value that does so.
OPEN = {
    'unroll': 0,
    'remat_policy': 'auto',
    'attention_kernel': 'auto',
    'linear_kernel': 'auto',
    'dtype': 'auto',
}
# Those that each machine chooses anew: weights do not have them, and a run may resume with others.
PER_MACHINE = ('unroll', 'remat_policy', 'attention_kernel', 'linear_kernel')


def build(model: str | Mapping, num_classes: int, **overrides) -> nn.Module:
    """Builds a model, to be applied to float32 images [batch, height, width, channels] in [-1, 1].

    Args:
      model: a name from variants.names(), or the fields themselves (`config.model`).
      num_classes: number of logits; 0 for the representation before the head's last layer.
      **overrides: fields that differ, for example dtype='bfloat16'; see vit.ViT,
        encoder.BlockFields and resnet.ResNet.

    Raises UserError when the name or a field is unknown, or the fields do not fit together.
    """
    family, names, given = _completed(variants.get(model) if isinstance(model, str) else model)
    given |= overrides
    check_field_names('model', given, names)
    if given['dtype'] == OPEN['dtype']:  # outside of training
        given['dtype'] = 'float32'
    if not isinstance(num_classes, int) or num_classes < 0:
        raise UserError(f'num_classes is {num_classes}: expected a whole number, 0 for no head.')
    if given['resnet'] is not None:
        given['resnet'] = dict(given['resnet'])
    if family is ViT:
        given['fields'] = BlockFields(
            **{f.name: given.pop(f.name) for f in dataclasses.fields(BlockFields)}
        )
    built = family(num_classes=num_classes, **given)
    built.check()
    return built


def fields(name: str) -> dict:
    """All fields of a named model, its own and the defaults: what `config.model` starts from."""
    return _completed(variants.get(name))[-1]


def tables() -> dict[str, dict[str, Field]]:
    """The fields of `config.model`, by the models that have them."""
    return {
        'transformers': declared(ViT, BlockFields, prefix='model.'),
        'ResNets': declared(ResNet, prefix='model.'),
        'ResNets and hybrids': declared(Backbone, prefix='model.resnet.'),
    }


def _completed(given):
    """The class that has these fields, the names of all its fields, and the given with defaults."""
    if 'hidden_size' in given or not given.get('resnet'):  # only transformers have a hidden size
        family, classes = ViT, (ViT, BlockFields)
    else:
        family, classes = ResNet, (ResNet,)
    defaults = {
        f.name: f.default
        for c in classes
        for f in dataclasses.fields(c)
        if f.name not in ('num_classes', 'fields', 'parent', 'name')
    }
    return (
        family,
        list(defaults),
        {name: default for name, default in defaults.items() if default is not dataclasses.MISSING}
        | dict(given),
    )
