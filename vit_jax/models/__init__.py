"""Models: images to logits, nothing else. Needs JAX and Flax only.

    from vit_jax import models
    model = models.build('b16', num_classes=1000)
    params = model.init(key, images)['params']
    logits = model.apply({'params': params}, images, train=False)
"""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn

from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.models.check import check
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import ViT


def build(model: str | Mapping, num_classes: int, **overrides) -> nn.Module:
    """Builds a model.

    Args:
      model: a name from variants.names(), or the fields themselves (`config.model`).
      num_classes: number of logits; 0 for the representation before the head's last layer.
      **overrides: fields that differ, for example dtype='bfloat16'; see vit.ViT, resnet.ResNet.

    Returns:
      A flax module; apply it to float32 images [batch, height, width, channels] in [-1, 1].

    Raises:
      UserError: the name or a field is unknown, or the fields do not fit together.
    """
    given = variants.get(model) if isinstance(model, str) else dict(model)
    family = _family(given)
    given = {**_defaults(family), **given, **overrides}
    if given.get('resnet') is not None:
        given['resnet'] = dict(given['resnet'])
    check(family, given)
    if not isinstance(num_classes, int) or num_classes < 0:
        raise UserError(f'num_classes is {num_classes}: expected a whole number, 0 for no head.')
    return family(num_classes=num_classes, **given)


def fields(name: str) -> dict:
    """All fields of a named model, its own and the defaults: what `config.model` starts from."""
    given = variants.get(name)
    return {**given, **{k: v for k, v in _defaults(_family(given)).items() if k not in given}}


def _family(given):
    """The class whose fields these are; only transformers have a hidden size."""
    return ViT if 'hidden_size' in given or not given.get('resnet') else ResNet


def _defaults(family):
    return {f.name: f.default for f in dataclasses.fields(family)
            if f.default is not dataclasses.MISSING and f.name not in ('parent', 'name')}
