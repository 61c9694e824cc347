"""Arrays that fit no model, models that fit no layout, layouts that nobody knows: what is said."""

import dataclasses
import json

import numpy as np
import pytest

from tests.support import small
from tests.support.small import FILES, assert_same_arrays, through
from vit_jax import weights
from vit_jax.errors import UserError


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
    ('vit', 'huggingface', 'x.npz', 'expected a directory, without such an ending.'),
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


def test_positions_that_a_file_would_read_as_a_square(tmp_path):
    """1x3 patches and a class token are as many as 2x2 patches."""
    given = small.make('vit', gelu='erf', layer_norm_epsilon=1e-6)
    position = given.params['position']['embedding'][:, :4]
    given = dataclasses.replace(
        given, params=given.params | {'position': {'embedding': position}},
        preprocess=given.preprocess | {'image_size': (8, 24)})
    assert 'as many positions as 1x3 with one: name a directory' in message(
        weights.save, given, str(tmp_path / 'x.pth'), 'timm')
    assert through(given, 'timm', tmp_path / 'x')[1].grid() == (1, 3)


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
