"""Finds fields of a model that do not exist or do not fit together, before anything is built."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn

from vit_jax.errors import UserError, check_choice, nearest_names
from vit_jax.models import position
from vit_jax.models.encoder import GELU
from vit_jax.models.resnet import Backbone
from vit_jax.models.stack import REMAT_POLICIES
from vit_jax.models.vit import ViT, as_pair

CHOICES = {
    'attention': ('full', 'axial'),
    'pool': ('cls', 'gap', 'map', 'none'),
    'gelu': tuple(GELU),
    'dtype': ('float32', 'bfloat16'),
    'remat_policy': REMAT_POLICIES,
}
LEAST = {'hidden_size': 1, 'num_layers': 1, 'mlp_dim': 1, 'num_heads': 1, 'unroll': 1,
         'representation_size': 0, 'layer_scale_init': 0}
RATES = ('dropout_rate', 'attention_dropout_rate', 'stochastic_depth_rate')
_INHERITED = ('dtype', 'unroll', 'remat_policy')  # fields that a Backbone has from its model


def check(family: type[nn.Module], fields: Mapping) -> None:
    """Raises UserError unless `fields`, all of them, make a model of the family.

    Args:
      family: ViT or ResNet.
      fields: without num_classes.
    """
    _check_names(fields, _names(family) - {'num_classes'}, 'model')
    for name, valid in CHOICES.items():
        if name in fields:
            check_choice(f'model.{name}', fields[name], valid)
    for name, least in LEAST.items():
        _check_least(f'model.{name}', fields.get(name, least), least)
    if fields['resnet'] is not None:
        _check_resnet(fields['resnet'], hybrid=family is ViT)
    if family is ViT:
        _check_transformer(fields)


def _check_transformer(fields):
    as_pair(fields['patch_size'], 'model.patch_size')
    if fields['hidden_size'] % fields['num_heads']:
        raise UserError(f'model.hidden_size {fields["hidden_size"]} does not divide among '
                        f'{fields["num_heads"]} heads (model.num_heads).')
    for name in RATES:
        if not 0 <= fields[name] < 1:
            raise UserError(f'model.{name} is {fields[name]}: expected at least 0 and below 1.')
    position.check(fields['position'], fields['position_at'], fields['hidden_size'])
    if fields['attention'] == 'axial':
        if fields['pool'] == 'cls':
            raise UserError('model.pool is cls, but a class token has no row or column for axial '
                            'attention: set model.pool to gap, map or none.')
        if fields['position'] == 'relative' and fields['position_at'] == 'shared':
            raise UserError('model.position relative cannot be shared in axial attention, whose '
                            'rows and columns differ: set model.position_at to every_layer.')


def _check_resnet(fields, hybrid):
    _check_names(fields, _names(Backbone) - set(_INHERITED), 'model.resnet')
    units = fields['units']
    if not isinstance(units, (tuple, list)) or not all(_is_whole(n) and n > 0 for n in units):
        raise UserError(f'model.resnet.units is {units!r}: expected the number of residual units '
                        'of each stage, as in 3,4,6,3.')
    if not (units or hybrid):
        raise UserError('model.resnet.units is empty: a ResNet needs at least one stage.')
    for name in ('width', 'num_groups'):
        _check_least(f'model.resnet.{name}', fields[name], 1)
    if fields['width'] % fields['num_groups']:
        raise UserError(f'model.resnet.width {fields["width"]} does not divide among '
                        f'{fields["num_groups"]} groups (model.resnet.num_groups).')
    check_choice('model.resnet.weight_epsilon_on', fields['weight_epsilon_on'],
                 ('std', 'variance'))
    if hybrid and fields['preactivation']:
        raise UserError('model.resnet.preactivation is True, which leaves the features that a '
                        'hybrid takes as patches without normalisation: set it to False.')


def _check_names(fields, known, where):
    for name in fields:
        if name not in known:
            raise UserError(f'{where} has no field {name!r}. {nearest_names(name, sorted(known))}'
                            f'Its fields are: {", ".join(sorted(known))}.')
    if missing := sorted(known - set(fields)):
        raise UserError(f'{where} lacks {", ".join(missing)}: start from a name, as in '
                        "models.fields('b16') or models.fields('r50x1'), and change fields.")


def _check_least(field, value, least):
    whole = field != 'model.layer_scale_init'
    if value < least or (whole and not _is_whole(value)):
        raise UserError(f'{field} is {value}: expected {"a whole number, " if whole else ""}at '
                        f'least {least}.')


def _is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _names(module):
    return {f.name for f in dataclasses.fields(module)} - {'parent', 'name'}
