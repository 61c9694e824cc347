"""Fields of a ViT that do not fit together are refused."""

import pytest

from tests.support.errors import refused
from tests.support.vit import SMALL
from vit_jax import models

AXIAL = dict(attention='axial', pool='gap')


@pytest.mark.parametrize(
    ('fields', 'field', 'value'),
    [
        (dict(attention='axial'), 'model.pool', 'cls'),
        (AXIAL | dict(num_registers=2), 'model.num_registers', 2),
        (AXIAL | dict(block='parallel'), 'model.block', 'parallel'),
        (AXIAL | dict(position='relative', position_at='shared'), 'model.position_at', 'shared'),
        (dict(num_registers=-1), 'model.num_registers', -1),
        (dict(stem_norm=1), 'model.stem_norm', 1),
        (dict(stochastic_depth_rate=-0.1), 'model.stochastic_depth_rate', -0.1),
        (dict(num_layers=2.5), 'model.num_layers', 2.5),
        (dict(representation_size=-1), 'model.representation_size', -1),
        (dict(patch_size=0), 'model.patch_size', 0),
    ],
    ids=str,
)
def test_impossible_values_are_refused(fields, field, value):
    with refused(kind='value', field=field, value=value):
        models.build(SMALL, 5, **fields)


@pytest.mark.parametrize(
    ('fields', 'expected'),
    [
        (dict(pool='avg'), dict(kind='choice', field='model.pool', value='avg')),
        (dict(atention='axial'), dict(kind='unknown', field='model', value='atention')),
        (dict(fields=None), dict(kind='unknown', field='model', value='fields')),
        (dict(resnet={}), dict(kind='missing', field='model.resnet.fixed_padding')),
    ],
    ids=str,
)
def test_unknown_names_and_choices_are_refused(fields, expected):
    with refused(**expected):
        models.build(SMALL, 5, **fields)


def test_the_message_names_the_fields_and_the_remedy():
    with refused(kind='value') as error:
        models.build(SMALL, 5, attention='axial', pool='gap', num_registers=2)
    assert str(error.value) == (
        'model.attention is axial, model.pool gap and model.num_registers 2: axial attention '
        'supports neither a class token nor registers, because they are in no row or column. Set '
        'model.pool to gap, map or none, and model.num_registers to 0.'
    )
