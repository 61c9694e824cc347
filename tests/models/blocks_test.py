"""Blocks that a config names; tests/models/vit_test.py compares them with their papers."""

import sys
import types

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.models.encoder import Block, EncoderBlock


class AttentionOnly(Block):
    """A block of a user."""

    @nn.compact
    def __call__(self, x, depth_rate, embedding, train, return_intermediates):
        x, relative = self.with_positions(x, embedding)
        y = self.layer_norm('norm')(x)
        queries = y[:, : self.num_queries]
        y, weights = self.self_attention(queries, y, relative, train, return_intermediates)
        x = x[:, : self.num_queries] + self.branch(y, depth_rate, train, 'scale1')
        if not return_intermediates:
            return x, None
        return x, {'tokens': x, 'attention': weights}


@pytest.fixture(autouse=True)
def my_lab(monkeypatch):
    module = types.ModuleType('my_lab')
    module.AttentionOnly = AttentionOnly
    module.same = EncoderBlock
    module.number = 3
    module.function = lambda: None
    monkeypatch.setitem(sys.modules, 'my_lab', module)


@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_a_model_of_a_users_block_is_built_and_applied(pool):
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, block='my_lab:AttentionOnly', pool=pool)
    params = randomised(model, images)
    assert set(params['blocks']) == {'attention', 'norm'}
    logits = apply(model, {'params': params}, images)
    expected, outputs = apply(model, {'params': params}, images, return_intermediates=True)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert outputs['tokens'].shape[0] == SMALL['num_layers']


def test_a_block_can_be_named_by_its_class():
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5)
    params = {'params': randomised(model, images)}
    other = models.build(SMALL, 5, block='my_lab:same')
    jax.tree.map(
        np.testing.assert_array_equal, apply(model, params, images), apply(other, params, images)
    )


@pytest.mark.parametrize(
    ('fields', 'kind'),
    [
        ({'block': 'paralel'}, 'choice'),
        ({'block': 'no_such_lab:Block'}, 'unknown'),
        ({'block': 'my_lab:number'}, 'unknown'),
        ({'block': 'my_lab:function'}, 'value'),
        ({'block': 'parallel', 'attention': 'axial', 'pool': 'gap'}, 'value'),
    ],
)
def test_unknown_and_unsuitable_blocks_are_refused(fields, kind):
    with refused(kind, field='model.block', value=fields['block']):
        models.build(SMALL, 5, **fields)
