"""The representations of an image in a model, for classifiers on frozen features."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from vit_jax.errors import UserError, check_choice
from vit_jax.models.resnet import ResNet

# The representations by name.
NAMES = {
    'pre_logits': 'the input of the last linear layer',
    'representation': 'the class token or the pooled tokens, before the head',
    'patch_mean': 'the mean of all patches after the last LayerNorm',
    'logits': 'the output',
}
# The head fields that are set to 0 for each representation, to leave out layers of the head.
_HEAD_FIELDS = {
    'pre_logits': ('num_classes',),
    'representation': ('num_classes', 'representation_size'),
    'patch_mean': ('num_classes', 'representation_size'),
    'logits': (),
}


def check(model: nn.Module, name: str) -> None:
    """Raises UserError unless the model has the representation."""
    check_choice('the representation', name, NAMES)
    if name == 'patch_mean' and isinstance(model, ResNet):
        raise UserError(
            'the representation is patch_mean, and this model has no patches. Use pre_logits.',
            kind='value',
            field='the representation',
            value=name,
        )
    if name == 'logits' and not model.num_classes:
        raise UserError(
            'the representation is logits, and this model has no head. Use pre_logits.',
            kind='value',
            field='the representation',
            value=name,
        )


def of(
    model: nn.Module, params: PyTree, images: Float[Array, 'batch height width channels'], name: str
) -> Float[Array, 'batch features']:
    """Returns the float32 representation of images.

    Args:
      model: a model from models.build.
      params: its parameters.
      images: normalised pixels.
      name: a key of NAMES.
    """
    model_fields = {field.name for field in dataclasses.fields(model)}
    # A ResNet has no representation_size.
    changes = {field: 0 for field in _HEAD_FIELDS[name] if field in model_fields}
    body = model.clone(**changes)  # type: ignore[arg-type]  # fields, not arguments of clone's own
    if name != 'patch_mean':
        return body.apply({'params': params}, images)  # type: ignore[return-value]  # a tuple only if mutable
    _, outputs = body.apply({'params': params}, images, return_intermediates=True)
    return outputs['encoded'][:, model.prefix :].astype(jnp.float32).mean(axis=1)
