"""Models: images to logits, nothing else. Needs JAX and Flax only.

    from vit_jax import models
    model = models.build('b16', num_classes=1000)
    params = model.init(key, images)['params']
    logits = model.apply({'params': params}, images, train=False)
"""

from collections.abc import Mapping

import flax.linen as nn

from vit_jax.models import variants
from vit_jax.models.vit import ViT


def build(model: str | Mapping, num_classes: int, **overrides) -> nn.Module:
    """Builds a model.

    Args:
      model: a name from variants.names(), or the fields themselves (`config.model`).
      num_classes: number of logits; 0 for the representation before the head.
      **overrides: fields that differ, for example dtype='bfloat16'; see vit.ViT.

    Returns:
      A flax module; apply it to float32 images [batch, height, width, channels] in [-1, 1].

    Raises:
      UserError: the name is unknown.
    """
    fields = variants.get(model) if isinstance(model, str) else dict(model)
    return ViT(num_classes=num_classes, **{**fields, **overrides})
