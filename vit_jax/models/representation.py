"""What a model makes of an image, by name, for classifiers that are trained on frozen features."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from vit_jax.errors import UserError, check_choice
from vit_jax.models.resnet import ResNet

# What images may be represented by.
NAMES = {
    'pre_logits': 'the input of the last linear layer',
    'representation': 'the class token, or what the tokens are pooled to, before the head',
    'patch_mean': 'the mean of all patches after the last LayerNorm',
    'logits': 'the output',
}


def check(model: nn.Module, name: str) -> None:
    """Raises UserError unless the model has the representation."""
    check_choice('the representation', name, NAMES)
    if name == 'patch_mean' and isinstance(model, ResNet):
        raise UserError(
            'the representation is patch_mean, and this model has no patches: take pre_logits.'
        )
    if name == 'logits' and not model.num_classes:
        raise UserError(
            'the representation is logits, and this model has no head: take pre_logits.'
        )


def of(
    model: nn.Module, params: PyTree, images: Float[Array, 'batch height width channels'], name: str
) -> Float[Array, 'batch features']:
    """One of NAMES of images, float32, from a model and its parameters."""
    head = {'pre_logits': ('num_classes',), 'logits': ()}.get(
        name, ('num_classes', 'representation_size')
    )
    fields = {field.name for field in dataclasses.fields(model)}  # a ResNet has one layer
    zeros = {field: 0 for field in head if field in fields}
    body = model.clone(**zeros)  # type: ignore[arg-type]  # none is an argument of clone's own
    if name != 'patch_mean':
        return body.apply({'params': params}, images)  # type: ignore[return-value]  # a tuple only if mutable
    _, outputs = body.apply({'params': params}, images, return_intermediates=True)
    return outputs['encoded'][:, model.prefix :].astype(jnp.float32).mean(axis=1)
