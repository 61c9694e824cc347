"""Blocks that a config names; that they equal their papers: tests/models/vit_test.py."""

import sys
import types

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.support.parameters import apply, randomised
from tests.support.vit import SMALL, random_images
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models.encoder import Block, EncoderBlock


class AttentionOnly(Block):
    """A block of the user's own."""

    @nn.compact
    def __call__(self, x, depth_rate, embedding, train, return_intermediates):
        x, relative = self.with_positions(x, embedding)
        y = self.layer_norm('norm')(x)
        y, weights = self.self_attention(
            y[:, : self.wanted], y, relative, train, return_intermediates
        )
        x = x[:, : self.wanted] + self.branch(y, depth_rate, train, 'scale1')
        return x, {'tokens': x, 'attention': weights} if return_intermediates else None


@pytest.fixture(autouse=True)
def my_lab(monkeypatch):
    module = types.ModuleType('my_lab')
    module.AttentionOnly = AttentionOnly
    module.same = EncoderBlock
    module.number = 3
    module.function = lambda: None
    monkeypatch.setitem(sys.modules, 'my_lab', module)


@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_a_block_of_the_user_makes_a_model(pool):
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5, block='my_lab:AttentionOnly', pool=pool)
    params = randomised(model, images)
    assert set(params['blocks']) == {'attention', 'norm'}
    logits = apply(model, {'params': params}, images)
    whole, outputs = apply(model, {'params': params}, images, return_intermediates=True)
    np.testing.assert_allclose(logits, whole, rtol=1e-5, atol=1e-6)
    assert outputs['tokens'].shape[0] == SMALL['num_layers']


def test_a_block_that_is_named_as_a_class_is_that_class():
    images = random_images(2, 8, 12, 3)
    model = models.build(SMALL, 5)
    params = {'params': randomised(model, images)}
    other = models.build(SMALL, 5, block='my_lab:same')
    jax.tree.map(
        np.testing.assert_array_equal, apply(model, params, images), apply(other, params, images)
    )


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'block': 'paralel'}, "model.block is 'paralel'. Did you mean parallel"),
        ({'block': 'no_such_lab:Block'}, 'no_such_lab cannot be imported'),
        ({'block': 'my_lab:number'}, "my_lab has no function 'number'"),
        ({'block': 'my_lab:function'}, 'no subclass of vit_jax.models.encoder.Block'),
        ({'block': 'parallel', 'attention': 'axial', 'pool': 'gap'}, 'model.attention axial'),
    ],
)
def test_blocks_that_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        models.build(SMALL, 5, **fields)
