"""Impossible fields of blocks are refused."""

import pytest

from tests.support.errors import refused
from tests.support.vit import SMALL
from vit_jax import models


@pytest.mark.parametrize(
    ('fields', 'kind', 'field', 'value'),
    [
        (dict(num_heads=5), 'value', 'model.hidden_size', 32),
        (dict(num_heads=0), 'value', 'model.num_heads', 0),
        (dict(mlp_dim=True), 'value', 'model.mlp_dim', True),
        (dict(dropout_rate=1.0), 'value', 'model.dropout_rate', 1.0),
        (dict(attention_dropout_rate=-0.5), 'value', 'model.attention_dropout_rate', -0.5),
        (dict(layer_scale_init=-1), 'value', 'model.layer_scale_init', -1),
        (dict(droput_rate=0.1), 'unknown', 'model', 'droput_rate'),
        (dict(gelu='exact'), 'choice', 'model.gelu', 'exact'),
        (dict(attention_kernel='flash'), 'choice', 'model.attention_kernel', 'flash'),
        (dict(linear_kernel='tpu'), 'choice', 'model.linear_kernel', 'tpu'),
    ],
    ids=str,
)
def test_impossible_fields_are_refused(fields, kind, field, value):
    with refused(kind=kind, field=field, value=value):
        models.build(SMALL, 5, **fields)
