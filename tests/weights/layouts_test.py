"""Every layout gives back, bit for bit, what it was given; what it cannot hold it names."""

import dataclasses
import itertools
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.support import small
from tests.support.small import FILES, PATHS, assert_same_arrays, through
from vit_jax import weights
from vit_jax.errors import UserError

HOLDS = {
    'vit': PATHS, 'gap': ('google', 'big_vision', 'timm', 'vit_jax'),
    'map': ('big_vision', 'timm', 'vit_jax'), 'headless': PATHS,
    'hidden-head': ('google', 'big_vision', 'torchvision', 'vit_jax'),
    'layer-scale': ('timm', 'vit_jax'), 'no-position': ('timm', 'vit_jax'),
    'sincos': ('big_vision', 'vit_jax'),
    'rectangle': ('google', 'big_vision', 'timm', 'huggingface', 'vit_jax'),
    'root': ('google', 'timm', 'vit_jax'), 'hybrid': ('google', 'timm', 'vit_jax'),
    'bit': ('google', 'timm', 'vit_jax'), 'axial': ('vit_jax',),
}


def position_in_class_token(given):
    """big_vision has no position embedding of the class token: the token has it in itself."""
    params = given.params
    if 'cls' not in params or 'position' not in params:
        return given
    position = params['position']['embedding'].copy()
    cls = params['cls'] + position[:, :1]
    position[:, :1] = 0
    return dataclasses.replace(given, params=params | {
        'cls': cls, 'position': {'embedding': position}})


@pytest.mark.parametrize(('layout', 'name'), FILES, ids=lambda x: x)
@pytest.mark.parametrize('model', small.MODELS)
def test_there_and_back(model, layout, name, tmp_path):
    path = tmp_path / name
    given = small.make(model)
    unnamed = (layout, name) == ('timm', 'x') and 'resnet' in small.MODELS[model]
    if layout not in HOLDS[model] or unnamed:
        given, _ = weights.approximate(given, str(path), layout)
        with pytest.raises(UserError, match='cannot hold|has no hidden layer|timm has no name for'):
            weights.save(given, str(path), layout)
        assert not any(tmp_path.iterdir())
        return
    if layout == 'big_vision':
        given = position_in_class_token(given)
    given, found = through(given, layout, path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert_same_arrays(found.params, given.params)
    assert found.model == given.model
    assert (found.layout, found.num_classes) == (layout, given.num_classes)
    if layout in ('vit_jax', 'huggingface') or name == 'x':
        lost = (model, layout) == ('rectangle', 'huggingface')  # see the next test
        expected = {'image_size': given.image_size()} if lost else given.preprocess
        assert (found.classes, found.preprocess) == (given.classes, expected)


def test_no_processor_of_transformers_for_images_that_are_no_square(tmp_path, caplog):
    through(small.make('vit'), 'huggingface', tmp_path / 'square')
    assert (tmp_path / 'square/preprocessor_config.json').exists()
    assert not caplog.records
    through(small.make('rectangle'), 'huggingface', tmp_path / 'x')
    assert not (tmp_path / 'x/preprocessor_config.json').exists()
    assert json.loads((tmp_path / 'x/config.json').read_text())['image_size'] == [16, 12]
    assert 'images are 16x12, and no processor of transformers' in caplog.text


@pytest.mark.parametrize(('first', 'second'), list(itertools.permutations(PATHS, 2)))
def test_every_pair(first, second, tmp_path):
    """What comes out of one layout goes into the next and comes back as the same file."""
    (tmp_path / 'a').mkdir(), (tmp_path / 'b').mkdir(), (tmp_path / 'c').mkdir()
    given = small.make('vit')
    if second == 'big_vision':
        given = position_in_class_token(given)
    _, a = through(given, first, tmp_path / 'a' / PATHS[first])
    _, b = through(a, second, tmp_path / 'b' / PATHS[second])
    _, c = through(b, first, tmp_path / 'c' / PATHS[first])
    assert_same_arrays(b.params, a.params)
    assert_same_arrays(c.params, a.params)
    arrays = {file.relative_to(tmp_path / 'a') for file in (tmp_path / 'a').rglob('*')
              if file.suffix in ('.npz', '.pth')}
    for file in arrays:
        assert (tmp_path / 'a' / file).read_bytes() == (tmp_path / 'c' / file).read_bytes()


def test_big_vision_moves_the_position_of_the_class_token_and_no_logit(tmp_path):
    given = small.make('vit')
    _, found = through(given, 'big_vision', tmp_path / 'x.npz')
    assert not found.params['position']['embedding'][:, 0].any()
    batch = small.images(given)
    np.testing.assert_allclose(small.logits(found, batch), small.logits(given, batch), rtol=1e-4,
                               atol=1e-5)


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16], ids=['float16', 'bfloat16'])
@pytest.mark.parametrize(('layout', 'name'), FILES, ids=lambda x: x)
def test_dtypes_survive(layout, name, dtype, tmp_path):
    given = small.make('vit')
    given = dataclasses.replace(given, params=jax.tree.map(lambda x: x.astype(dtype), given.params))
    if layout == 'big_vision':
        given = position_in_class_token(given)
    given, found = through(given, layout, tmp_path / name)
    assert_same_arrays(found.params, given.params)


@pytest.mark.parametrize('prefix', ['opt/target/', 'params/'])
def test_prefixes_and_the_newer_names_of_google(prefix, tmp_path):
    given = small.make('vit')
    _, found = through(given, 'google', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = dict(file)
    assert any('MultiHeadDotProductAttention_1' in name for name in arrays)
    arrays = {prefix + name.replace('Attention_1', 'Attention_0').replace('Norm_2', 'Norm_1')
              .replace('MlpBlock_3', 'MlpBlock_0'): x for name, x in arrays.items()}
    np.savez(tmp_path / 'x.npz', **arrays, step=np.int32(3))
    assert_same_arrays(weights.load(str(tmp_path / 'x.npz')).params, found.params)


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.',
                                    '_orig_mod.module.'])
def test_prefixes_of_pytorch(prefix, tmp_path):
    _, found = through(small.make('vit'), 'timm', tmp_path / 'x.pth')
    arrays, _ = weights.files.read(str(tmp_path / 'x.pth'))
    arrays = {prefix + name: x for name, x in arrays.items()}
    weights.files.write(str(tmp_path / 'x.pth'), arrays, '.pth')
    again = weights.load(str(tmp_path / 'x.pth'))
    assert again.model == found.model
    assert_same_arrays(again.params, found.params)


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


def test_group_norms_of_google_with_one_axis_or_four(tmp_path):
    _, found = through(small.make('hybrid'), 'google', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = dict(file)
    assert arrays['gn_root/scale'].shape == (1, 1, 1, 32)
    np.savez(tmp_path / 'x.npz', **{name: x.ravel() if '/gn' in f'/{name}' else x
                                    for name, x in arrays.items()})
    assert_same_arrays(weights.load(str(tmp_path / 'x.npz')).params, found.params)


def test_older_names_of_torchvision(tmp_path):
    _, found = through(small.make('vit'), 'torchvision', tmp_path / 'x.pth')
    arrays, _ = weights.files.read(str(tmp_path / 'x.pth'))
    arrays = {name.replace('mlp.0.', 'mlp.linear_1.').replace('mlp.3.', 'mlp.linear_2.'): x
              for name, x in arrays.items()}
    weights.files.write(str(tmp_path / 'x.pth'), arrays, '.pth')
    assert_same_arrays(weights.load(str(tmp_path / 'x.pth')).params, found.params)


@pytest.mark.parametrize('path', ['x', 'x.safetensors'])
def test_patches_alone_have_positions_in_some_models_of_timm(path, tmp_path):
    """As in DeiT III, with a config.json or without: the class token gets a position of zeros."""
    _, found = through(small.make('vit', gelu='erf'), 'timm', tmp_path / path)
    file = tmp_path / path / 'model.safetensors' if path == 'x' else tmp_path / path
    arrays, _ = weights.files.read(str(file))
    arrays['pos_embed'] = arrays['pos_embed'][:, 1:]
    weights.files.write(str(file), arrays, '.safetensors')
    again = weights.load(str(tmp_path / path))
    assert again.grid() == (2, 2)
    assert not again.params['position']['embedding'][:, 0].any()
    np.testing.assert_array_equal(again.params['position']['embedding'][:, 1:],
                                  found.params['position']['embedding'][:, 1:])


def test_grid_of_positions_in_every_layer(tmp_path):
    given = small.make('vit', position_at='every_layer')
    _, found = through(given, 'vit_jax', tmp_path / 'x.safetensors')
    found = dataclasses.replace(found, preprocess=None)
    assert (found.grid(), found.image_size()) == ((2, 2), (16, 16))


def test_grid_and_image_size(tmp_path):
    given, found = through(small.make('rectangle'), 'google', tmp_path / 'x.npz')
    assert (given.grid(), given.image_size(), given.channels()) == ((2, 3), (16, 12), 5)
    assert found.grid() is None
    with pytest.raises(UserError, match='position embeddings of 6 patches, which are no square'):
        found.image_size()
    _, found = through(small.make('hybrid'), 'google', tmp_path / 'x.npz')
    with pytest.raises(UserError, match='of 12 patches, which are no square'):
        found.image_size()
    _, found = through(small.make('root'), 'google', tmp_path / 'x.npz')
    assert (found.grid(), found.image_size()) == ((3, 3), (24, 24))


def test_number_of_heads_of_published_sizes():
    sizes = dict(hidden_size=1280, num_layers=32, mlp_dim=5120)
    assert weights.model_lib.guess_heads(sizes) == 16
    assert weights.model_lib.guess_heads(sizes | dict(num_layers=3)) == 20
