"""What weights say of their images, and how many heads they have."""

import dataclasses

import pytest

from tests.support import small
from tests.support.small import through
from vit_jax.errors import UserError
from vit_jax.weights.model import guess_heads


def test_grid_of_positions_in_every_layer(tmp_path):
    given = small.make('vit', position_at='every_layer')
    _, found = through(given, 'vit_jax', tmp_path / 'x.safetensors')
    found = dataclasses.replace(found, preprocess=None)
    assert (found.grid(), found.image_size()) == ((2, 2), (16, 16))


def test_grid_and_image_size(tmp_path):
    given, found = through(small.make('rectangle'), 'google', tmp_path / 'x.npz')
    assert (given.grid(), given.image_size(), given.channels()) == ((2, 3), (16, 12), 5)
    assert found.grid() is None
    with pytest.raises(UserError, match='embeddings of 6 patches, which do not form a square'):
        found.image_size()
    _, found = through(small.make('hybrid'), 'google', tmp_path / 'x.npz')
    with pytest.raises(UserError, match='of 12 patches, which do not form a square'):
        found.image_size()
    _, found = through(small.make('root'), 'google', tmp_path / 'x.npz')
    assert (found.grid(), found.image_size()) == ((3, 3), (24, 24))


def test_number_of_heads_of_published_sizes():
    sizes = dict(hidden_size=1280, num_layers=32, mlp_dim=5120)
    assert guess_heads(sizes) == 16
    assert guess_heads(sizes | dict(num_layers=3)) == 20
