"""The sizes of a model from its weights: images, grids, heads, and limits."""

import dataclasses
import json

import numpy as np
import pytest

from tests.support import small
from tests.support.errors import refused
from tests.support.small import message, through
from vit_jax import weights
from vit_jax.weights import array_files
from vit_jax.weights.model import guess_heads


def test_the_grid_is_known_with_positions_in_every_layer(tmp_path):
    given = small.make('vit', position_at='every_layer')
    _, found = through(given, 'vit_jax', tmp_path / 'x.safetensors')
    found = dataclasses.replace(found, preprocess=None)
    assert (found.grid(), found.image_size()) == ((2, 2), (16, 16))


def test_grid_and_image_size_follow_the_positions(tmp_path):
    given, found = through(small.make('rectangle'), 'google', tmp_path / 'x.npz')
    assert (given.grid(), given.image_size(), given.channels()) == ((2, 3), (16, 12), 5)
    assert found.grid() is None
    with refused('missing', field='image_size') as error:
        found.image_size()
    assert str(error.value) == (
        f'{tmp_path}/x.npz has position embeddings of 6 patches, which do not form a square: add '
        '--preprocess image_size=HEIGHT,WIDTH of images that have as many.'
    )
    _, found = through(small.make('hybrid'), 'google', tmp_path / 'x.npz')
    with refused('missing', field='image_size'):
        found.image_size()
    _, found = through(small.make('root'), 'google', tmp_path / 'x.npz')
    assert (found.grid(), found.image_size()) == ((3, 3), (24, 24))


def test_kernels_and_loops_of_the_training_are_not_stored(tmp_path):
    """Another machine may lack the kernels, or compile an unrolled loop for minutes."""
    given = small.make('vit')
    trained = dataclasses.replace(
        given,
        model=given.model
        | {
            'attention_kernel': 'cudnn',
            'linear_kernel': 'cpu',
            'unroll': 48,
            'remat_policy': 'none',
        },
    )
    _, found = through(trained, 'vit_jax', tmp_path / 'x.safetensors')
    assert found.model == given.model
    assert found.model['attention_kernel'] == found.model['linear_kernel'] == 'auto'


def test_published_sizes_have_their_number_of_heads():
    sizes = dict(hidden_size=1280, num_layers=32, mlp_dim=5120)
    assert guess_heads(sizes) == 16
    assert guess_heads(sizes | dict(num_layers=3)) == 20


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        (
            'blocks.1000000.norm1.bias',
            'the weights have 1,000,001 layers: expected at most 1,000',
        ),
        ('blocks.999.norm1.bias', 'num_layers is 1000, but the longest axis of any array has 128'),
        (f'blocks.{"9" * 5000}.norm1.bias', 'no place for blocks.9999'),
        ('blocks.01.norm1.bias', 'no place for blocks.01.norm1.bias'),
    ],
    ids=lambda x: x[:25],
)
def test_impossible_numbers_in_names_are_refused(name, expected, tmp_path):
    path = str(tmp_path / 'x.safetensors')
    weights.save(small.make('vit', gelu='erf'), path, 'timm')
    arrays, _ = array_files.read(path)
    array_files.write(path, arrays | {name: arrays['norm.bias']}, '.safetensors')
    assert expected in message(weights.load, path)


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('block99999/unit01', 'the weights have 99,999 stages: expected at most 16'),
        ('block1/unit99999', 'the weights have 99,999 units of stage 0: expected at most 1,000'),
    ],
)
def test_impossible_numbers_in_names_of_a_resnet_are_refused(name, expected, tmp_path):
    path = str(tmp_path / 'x.npz')
    weights.save(small.make('bit'), path, 'google')
    arrays, _ = array_files.read(path)
    arrays[f'resnet/{name}/a/group_norm/gamma'] = np.ones(32, np.float32)
    array_files.write(path, arrays, '.npz')
    assert expected in message(weights.load, path)


@pytest.mark.parametrize(
    ('field', 'value', 'expected'),
    [
        ('num_hidden_layers', 1000, 'num_layers'),
        ('intermediate_size', 10**6, 'mlp_dim'),
        ('num_hidden_layers', 10**7, 'num_hidden_layers'),
    ],
)
def test_impossible_sizes_in_a_config_are_refused(field, value, expected, tmp_path):
    weights.save(small.make('vit'), str(tmp_path / 'x'), 'huggingface')
    file = tmp_path / 'x' / 'config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with refused('content', field=expected, file=tmp_path / 'x', value=value):
        weights.load(str(tmp_path / 'x'))


def test_too_many_layers_in_one_array_are_refused(tmp_path):
    np.savez(
        tmp_path / 'x.npz', **{'Transformer/encoderblock/LayerNorm_0/scale': np.ones((9999, 1))}
    )
    with refused('content', value=9999):
        weights.load(str(tmp_path / 'x.npz'))


def test_a_large_image_size_takes_no_memory(tmp_path):
    """No table of fixed positions is computed only for its shape."""
    given, path = small.make('sincos'), str(tmp_path / 'x.safetensors')
    for side in (16 * 10**3, 16 * 10**6):
        weights.save(
            dataclasses.replace(given, preprocess={'image_size': (side, side)}), path, 'vit_jax'
        )
        if side == 16 * 10**3:
            assert weights.load(path).image_size() == (side, side)
    with refused('content', field='preprocess.image_size[0]', value=16 * 10**6):
        weights.load(path)


def test_a_parameter_under_two_names_is_refused(tmp_path):
    path = str(tmp_path / 'x.npz')
    weights.save(small.make('vit'), path, 'google')
    arrays, _ = array_files.read(path)
    old, new = (f'Transformer/encoderblock_0/LayerNorm_{k}/bias' for k in (2, 1))
    array_files.write(path, arrays | {new: arrays[old]}, '.npz')
    assert f'{new} and {old} are the same parameter' in message(weights.load, path)
