"""Every layout gives back, bit for bit, what it was given; what it cannot hold it names."""

import dataclasses
import itertools
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.weights import small
from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights.model import flatten

PATHS = {'google': 'x.npz', 'big_vision': 'x.npz', 'timm': 'x', 'huggingface': 'x',
         'torchvision': 'x.pth', 'vit_jax': 'x.safetensors'}
FILES = [*PATHS.items(), ('timm', 'x.safetensors'), ('timm', 'x.pth')]
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


def through(given, layout, path):
    """`given`, as the layout can hold it, and what comes back."""
    given, _ = weights.approximate(given, str(path), layout)
    weights.save(given, str(path), layout)
    return given, weights.load(str(path))


def assert_same_arrays(found, expected):
    found, expected = flatten(found), flatten(expected)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        np.testing.assert_array_equal(found[name], x, err_msg=name)


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
        assert (found.classes, found.preprocess) == (given.classes, given.preprocess)


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


def test_patches_alone_have_positions_in_some_models_of_timm(tmp_path):
    """As in DeiT III: the class token gets a position of zeros."""
    _, found = through(small.make('vit'), 'timm', tmp_path / 'x')
    arrays, _ = weights.files.read(str(tmp_path / 'x/model.safetensors'))
    arrays['pos_embed'] = arrays['pos_embed'][:, 1:]
    weights.files.write(str(tmp_path / 'x/model.safetensors'), arrays, '.safetensors')
    again = weights.load(str(tmp_path / 'x'))
    assert not again.params['position']['embedding'][:, 0].any()
    np.testing.assert_array_equal(again.params['position']['embedding'][:, 1:],
                                  found.params['position']['embedding'][:, 1:])


def test_grid_and_image_size(tmp_path):
    given, found = through(small.make('rectangle'), 'google', tmp_path / 'x.npz')
    assert (given.grid(), given.image_size(), given.channels()) == ((2, 3), (16, 12), 5)
    with pytest.raises(UserError, match='position embeddings of 6 patches, which are no square'):
        found.grid()
    _, found = through(small.make('hybrid'), 'google', tmp_path / 'x.npz')
    with pytest.raises(UserError, match='of 12 patches, which are no square'):
        found.image_size()
    _, found = through(small.make('root'), 'google', tmp_path / 'x.npz')
    assert (found.grid(), found.image_size()) == ((3, 3), (24, 24))


def test_number_of_heads_of_published_sizes():
    sizes = dict(hidden_size=1280, num_layers=32, mlp_dim=5120)
    assert weights.model_lib.guess_heads(sizes) == 16
    assert weights.model_lib.guess_heads(sizes | dict(num_layers=3)) == 20


# Mistakes.


def message(function, *args):
    with pytest.raises(UserError) as error:
        function(*args)
    return str(error.value)


def edited(tmp_path, edit):
    """Path of a timm file whose arrays `edit` has changed."""
    path = str(tmp_path / 'x.safetensors')
    through(small.make('vit'), 'timm', path)
    arrays, _ = weights.files.read(path)
    edit(arrays)
    weights.files.write(path, arrays, '.safetensors')
    return path


def test_missing_extra_and_wrong_arrays_are_named(tmp_path):
    def edit(arrays):
        del arrays['blocks.1.norm2.bias']
        arrays['blocks.1.mlp.fc1.weight'] = np.ones((95, 128), np.float32)
        arrays['blocks.0.attn.qkv.bias'] = np.ones(128, np.float32)
        arrays['reg_token'] = np.ones((1, 4, 128), np.float32)

    text = message(weights.load, edited(tmp_path, edit))
    assert '(layout timm): the arrays do not fit' in text
    assert text.splitlines()[1:] == [
        '  no place for reg_token',
        '  blocks.0.attn.qkv.bias has shape (128,), expected (384,)',
        '  blocks.1.mlp.fc1.weight has shape (95, 128), expected (96, 128)',
        '  no blocks.1.norm2.bias']


@pytest.mark.parametrize(('name', 'array', 'expected'), [
    ('norm.weight', None, 'norm/scale, which tells the size of the model, is missing'),
    ('patch_embed.proj.weight', np.ones((128, 192)), 'size of the model, has shape (128, 192)'),
    ('pos_embed', np.ones((5, 128)), 'pos_embed has shape (5, 128), expected (1, 5, 128)'),
    ('head.bias', np.ones(3), 'head.weight has shape (7, 128), expected (3, 128)'),
    ('fc_norm.weight', np.ones(128), 'averages its tokens before the last LayerNorm (fc_norm)'),
])
def test_sizes_that_contradict(name, array, expected, tmp_path):
    def edit(arrays):
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = array.astype(np.float32)

    assert expected in message(weights.load, edited(tmp_path, edit))


def test_unknown_layout(tmp_path):
    np.savez(tmp_path / 'x.npz', **{'conv1.weight': np.ones(2), 'fc.bias': np.ones(2)})
    text = message(weights.load, str(tmp_path / 'x.npz'))
    assert 'is of an unknown layout. It has 2 arrays, among them conv1.weight, fc.bias' in text
    assert 'patch_embed.proj.weight' in text


def mistakes(rng, arrays):
    """Arrays with one or two of them left out, renamed or in another shape."""
    changes = (lambda x: None, lambda x: np.float32(1).reshape(()), np.ravel, lambda x: x[:0],
               lambda x: x[..., :-1], lambda x: x[None, ..., None], np.transpose)
    for name in rng.choice(list(arrays), rng.integers(1, 3)):
        x = changes[rng.integers(len(changes))](arrays.pop(name))
        if x is not None:
            arrays[name + 'x' * int(rng.integers(8) == 0)] = x
    return arrays


@pytest.mark.slow
@pytest.mark.parametrize('model', ['vit', 'map', 'hybrid', 'bit'])
@pytest.mark.parametrize(('layout', 'name'), FILES, ids=lambda x: x)
def test_whatever_is_wrong_with_arrays_is_explained(layout, name, model, tmp_path):
    """A mistake never ends in a traceback, and what loads nevertheless is a model that runs."""
    path = tmp_path / name
    given, _ = weights.approximate(small.make(model), str(path), layout)
    if weights.misfits(given, str(path), layout) or (name == 'x' and model in ('hybrid', 'bit')):
        return
    weights.save(given, str(path), layout)
    file = path / 'model.safetensors' if path.is_dir() else path
    arrays, metadata = weights.files.read(str(file))
    rng = np.random.default_rng(0)
    for _ in range(12):
        weights.files.write(str(file), mistakes(rng, dict(arrays)), file.suffix, metadata or None)
        try:
            found = weights.load(str(path))
        except UserError:
            continue
        assert np.isfinite(small.logits(found, small.images(given, 1))).all()


def test_huggingface_needs_its_config(tmp_path):
    through(small.make('vit'), 'huggingface', tmp_path / 'x')
    config = json.loads((tmp_path / 'x/config.json').read_text())
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'model_type': 'deit'}))
    assert "model_type vit; found 'deit'" in message(weights.load, str(tmp_path / 'x'))
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'hidden_act': 'relu'}))
    assert "model.gelu is 'relu'" in message(weights.load, str(tmp_path / 'x'))
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'num_hidden_layers': 3}))
    assert 'no vit.encoder.layer.2.attention' in message(weights.load, str(tmp_path / 'x'))
    (tmp_path / 'x/config.json').write_text(json.dumps(config | {'hidden_size': 64}))
    assert 'vit.embeddings.cls_token has shape (1, 1, 128), expected (1, 1, 64)' in message(
        weights.load, str(tmp_path / 'x'))


@pytest.mark.parametrize(('model', 'layout', 'name', 'expected'), [
    ('vit', 'torchvision', 'x.pth', "model.gelu is 'tanh', there it is 'erf'"),
    ('vit', 'timm', 'x.pth', "model.gelu is 'tanh', there it is 'erf'"),
    ('hybrid', 'torchvision', 'x.pth', "model.resnet is {"),
    ('rectangle', 'torchvision', 'x.pth', 'these are 16x12 with 5 channels and patches of 8x4'),
    ('hybrid', 'timm', 'x.pth', 'model.resnet.weight_epsilon is 1e-05, there it is 1e-08'),
    ('bit', 'huggingface', 'x', "model.resnet is 'a ResNet alone', there it is 'a part of a"),
    ('axial', 'google', 'x.npz', "model.attention is 'axial', there it is 'full'"),
    ('vit', 'google', 'x.pth', "'x.pth' cannot hold layout google: expected a name ending in .npz"),
    ('vit', 'huggingface', 'x.npz', 'expected a directory, without an ending'),
    ('vit', 'tim', 'x.npz', "layout is 'tim'. Did you mean timm"),
])
def test_layouts_that_cannot_hold_a_model(model, layout, name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = small.make(model, gelu='erf') if model == 'rectangle' else small.make(model)
    assert expected in message(weights.save, given, name, layout)
    assert not any(tmp_path.iterdir())


def test_heads_that_a_file_cannot_tell(tmp_path):
    given = small.make('vit', num_heads=4, gelu='erf')
    assert 'model.num_heads is 4, there it is 2' in message(
        weights.save, given, str(tmp_path / 'x.pth'), 'timm')
    assert through(given, 'timm', tmp_path / 'x')[1].model == given.model


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / 'x.npz'
    _, before = through(small.make('vit'), 'google', path)

    def fail(*_, **__):
        path.with_name('x.npz.half').write_text('')
        raise OSError('disk full')

    monkeypatch.setattr(weights.files, 'write', fail)
    with pytest.raises(OSError, match='disk full'):
        weights.save(before, str(path), 'google')
    assert_same_arrays(weights.load(str(path)).params, before.params)
