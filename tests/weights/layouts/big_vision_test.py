"""big_vision's files: positions of patches alone, stacked blocks, models of images and texts."""

import numpy as np
import pytest

from tests.support import described, small
from tests.support.small import assert_close, assert_same_arrays, through
from vit_jax import weights


def test_big_vision_moves_the_position_of_the_class_token_and_no_logit(tmp_path):
    given = small.make('vit')
    _, found = through(given, 'big_vision', tmp_path / 'x.npz')
    assert not found.params['position']['embedding'][:, 0].any()
    batch = small.images(given)
    np.testing.assert_allclose(small.logits(found, batch), small.logits(given, batch), rtol=1e-4,
                               atol=1e-5)


@pytest.mark.parametrize('model', ['vit', 'map'])
def test_image_tower_of_big_vision(model, tmp_path):
    """Beside it stand a tower of texts, of the same names, and the temperature."""
    _, found = through(small.make(model), 'big_vision', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = {f'params/{tower}/{name}': sign * x for name, x in file.items()
                  for tower, sign in (('txt', -1), ('img', 1))}
    np.savez(tmp_path / 'x.npz', **arrays, **{'params/t': np.ones(1), 'params/b': np.ones(1)})
    again = weights.load(str(tmp_path / 'x.npz'))
    assert (again.layout, again.model) == ('big_vision', found.model)
    assert_same_arrays(again.params, found.params)


@pytest.mark.parametrize('model', ['vit', 'gap', 'map', 'sincos'])
def test_stacked_blocks_of_big_vision(model, tmp_path):
    _, found = through(small.make(model), 'big_vision', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = dict(file)
    blocks = {name for name in arrays if 'encoderblock_0/' in name}
    assert len(blocks) == 16
    for name in blocks:
        pair = [arrays.pop(name), arrays.pop(name.replace('encoderblock_0', 'encoderblock_1'))]
        arrays[name.replace('encoderblock_0', 'encoderblock')] = np.stack(pair)
    np.savez(tmp_path / 'x.npz', **{f'params/{name}': x for name, x in arrays.items()})
    again = weights.load(str(tmp_path / 'x.npz'))
    assert again.layout == 'big_vision'
    assert again.model == found.model
    assert_same_arrays(again.params, found.params)


@pytest.mark.parametrize('model', ['vit', 'map', 'gap'])
def test_logits_of_a_model_written_down_with_flax(model, tmp_path):
    """Equal though the class token's position is in the token there."""
    given = small.make(model)
    weights.save(given, str(tmp_path / 'x.npz'), 'big_vision')
    batch = small.images(given)
    assert_close(described.big_vision_logits(given, tmp_path / 'x.npz', batch),
                 small.logits(given, batch))
