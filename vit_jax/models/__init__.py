"""Models: images to logits, nothing else. Needs JAX and Flax only.

    from vit_jax import models
    model = models.build('b16', num_classes=1000)
    params = model.init(key, images)['params']
    logits = model.apply({'params': params}, images, train=False)
"""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn

from vit_jax.errors import UserError, check_choice
from vit_jax.models import position, variants
from vit_jax.models.encoder import GELU
from vit_jax.models.resnet import ResNet
from vit_jax.models.stack import REMAT_POLICIES
from vit_jax.models.vit import ViT, as_pair

CHOICES = {
    'attention': ('full', 'axial'),
    'pool': ('cls', 'gap', 'map', 'none'),
    'gelu': tuple(GELU),
    'dtype': ('float32', 'bfloat16'),
    'remat_policy': REMAT_POLICIES,
    'resnet.weight_epsilon_on': ('std', 'variance'),
}


def build(model: str | Mapping, num_classes: int, **overrides) -> nn.Module:
    """Builds a model.

    Args:
      model: a name from variants.names(), or the fields themselves (`config.model`).
      num_classes: number of logits; 0 for the representation before the head.
      **overrides: fields that differ, for example dtype='bfloat16'; see vit.ViT, resnet.ResNet.

    Returns:
      A flax module; apply it to float32 images [batch, height, width, channels] in [-1, 1].

    Raises:
      UserError: the name is unknown, or the fields do not fit together.
    """
    given = variants.get(model) if isinstance(model, str) else model
    given = {**given, **overrides}
    if given.get('resnet') is not None:
        given['resnet'] = dict(given['resnet'])
    family = _family(given)
    check({**_defaults(family), **given})
    return family(num_classes=num_classes, **given)


def fields(name: str) -> dict:
    """All fields of a named model, its own and the defaults: what `config.model` starts from."""
    given = variants.get(name)
    return {**given, **{k: v for k, v in _defaults(_family(given)).items() if k not in given}}


def check(given: Mapping) -> None:
    """Raises UserError for fields of a model that cannot be used; all of them must be there."""
    resnet = given['resnet'] or {}
    for field, valid in CHOICES.items():
        holder, name = (resnet, field[7:]) if field.startswith('resnet.') else (given, field)
        if name in holder:
            check_choice(f'model.{field}', holder[name], valid)
    if given['unroll'] < 1:
        raise UserError(f'model.unroll is {given["unroll"]}: expected at least 1.')
    if resnet and resnet['width'] % resnet['num_groups']:
        raise UserError(f'model.resnet.width {resnet["width"]} does not divide among '
                        f'{resnet["num_groups"]} groups (model.resnet.num_groups).')
    if 'hidden_size' in given:
        _check_transformer(given)


def _check_transformer(given):
    as_pair(given['patch_size'])
    if given['hidden_size'] % given['num_heads']:
        raise UserError(f'model.hidden_size {given["hidden_size"]} does not divide among '
                        f'{given["num_heads"]} heads (model.num_heads).')
    for field in ('dropout_rate', 'attention_dropout_rate', 'stochastic_depth_rate'):
        if not 0 <= given[field] < 1:
            raise UserError(f'model.{field} is {given[field]}: expected at least 0 and below 1.')
    position.check(given['position'], given['position_at'], given['hidden_size'])
    if given['attention'] == 'axial':
        if given['pool'] == 'cls':
            raise UserError('model.pool is cls, but a class token has no row or column for axial '
                            'attention: set model.pool to gap, map or none.')
        if given['position'] == 'relative' and given['position_at'] == 'shared':
            raise UserError('model.position relative cannot be shared in axial attention, whose '
                            'rows and columns differ: set model.position_at to every_layer.')


def _family(given):
    """What has no hidden size is no transformer."""
    return ViT if 'hidden_size' in given else ResNet


def _defaults(family):
    return {f.name: f.default for f in dataclasses.fields(family)
            if f.default is not dataclasses.MISSING and f.name not in ('parent', 'name')}
