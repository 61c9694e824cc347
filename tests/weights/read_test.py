"""Reading of any layout: prefixes of names, arrays that do not fit, unknown layouts."""

import dataclasses

import numpy as np
import pytest

from tests.support import interop, small
from tests.support.errors import refused
from tests.support.small import FILES, assert_same_arrays, message, through
from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights import array_files, verify


@pytest.mark.parametrize(
    'prefix', ['module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.']
)
def test_prefixes_of_pytorch_are_removed(prefix, tmp_path):
    _, found = through(small.make('vit'), 'timm', tmp_path / 'x.safetensors')
    arrays, _ = array_files.read(str(tmp_path / 'x.safetensors'))
    arrays = {prefix + name: x for name, x in arrays.items()}
    array_files.write(str(tmp_path / 'x.safetensors'), arrays, '.safetensors')
    again = weights.load(str(tmp_path / 'x.safetensors'))
    assert again.model == found.model
    assert_same_arrays(again.params, found.params)


def edited(tmp_path, edit):
    """Path of a timm file whose arrays `edit` has changed."""
    path = str(tmp_path / 'x.safetensors')
    through(small.make('vit'), 'timm', path)
    arrays = {name: x.copy() for name, x in array_files.read(path)[0].items()}
    edit(arrays)
    array_files.write(path, arrays, '.safetensors')
    return path


def test_missing_extra_and_wrong_arrays_are_listed(tmp_path):
    def edit(arrays):
        del arrays['blocks.1.norm2.bias']
        arrays['blocks.1.mlp.fc1.weight'] = np.ones((95, 128), np.float32)
        arrays['blocks.0.attn.qkv.bias'] = np.ones(128, np.float32)
        arrays['dist_token'] = np.ones((1, 1, 128), np.float32)

    path = edited(tmp_path, edit)
    with refused('content', file=path) as error:
        weights.load(path)
    text = str(error.value)
    assert text.startswith(f'{path} (layout timm): the arrays do not fit')
    assert text.splitlines()[1:] == [
        '  no place for dist_token',
        '  blocks.0.attn.qkv.bias has shape (128,), expected (384,)',
        '  blocks.1.mlp.fc1.weight has shape (95, 128), expected (96, 128)',
        '  no blocks.1.norm2.bias',
    ]


@pytest.mark.parametrize(
    ('name', 'array', 'expected'),
    [
        ('norm.weight', None, 'norm/scale, which determines the size of the model, is missing'),
        ('patch_embed.proj.weight', np.ones((128, 192)), 'size of the model, has shape (128, 192)'),
        ('pos_embed', np.ones((5, 128)), 'pos_embed has shape (5, 128), expected (1, 5, 128)'),
        ('head.bias', np.ones(3), 'head.weight has shape (7, 128), expected (3, 128)'),
        ('fc_norm.weight', np.ones(128), 'has a class token and pools the patches'),
    ],
)
def test_contradictory_sizes_are_refused(name, array, expected, tmp_path):
    def edit(arrays):
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = array.astype(np.float32)

    assert expected in message(weights.load, edited(tmp_path, edit))


def test_an_unknown_layout_is_refused(tmp_path):
    np.savez(tmp_path / 'x.npz', **{'conv1.weight': np.ones(2), 'fc.bias': np.ones(2)})
    with refused('content', file=tmp_path / 'x.npz') as error:
        weights.load(str(tmp_path / 'x.npz'))
    text = str(error.value)
    assert 'is of an unknown layout. It has 2 arrays, among them conv1.weight, fc.bias' in text
    assert 'patch_embed.proj.weight' in text


def test_values_that_are_not_finite_are_counted(tmp_path):
    def edit(arrays):
        arrays['blocks.1.mlp.fc1.weight'][0, :3] = np.nan, np.inf, -np.inf
        arrays['norm.bias'] = arrays['norm.bias'].astype(np.float64)
        arrays['norm.bias'][5] = 1e300  # is infinite in float32

    path = edited(tmp_path, edit)
    with refused('content', file=path) as error:
        weights.load(path)
    assert str(error.value).startswith(
        f'{path} has values that are not finite: 3 of 24,576 in '
        'blocks/mlp/dense1/kernel, 1 of 128 in norm/bias. Its training'
    )
    found = weights.load(path, allow_nonfinite=True)
    assert np.isnan(found.params['blocks']['mlp']['dense1']['kernel']).sum() == 1


def mistakes(rng, arrays):
    """The arrays, one or two of them missing, renamed or in another shape."""
    changes = (
        lambda x: None,
        lambda x: np.float32(1).reshape(()),
        np.ravel,
        lambda x: x[:0],
        lambda x: x[..., :-1],
        lambda x: x[None, ..., None],
        np.transpose,
    )
    for name in rng.choice(list(arrays), rng.integers(1, 3)):
        x = changes[rng.integers(len(changes))](arrays.pop(name))
        if x is not None:
            arrays[name + 'x' * int(rng.integers(8) == 0)] = x
    return arrays


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize('model', ['vit', 'map', 'hybrid', 'bit'])
@pytest.mark.parametrize(('layout', 'name'), FILES, ids=lambda x: x)
def test_wrong_arrays_give_a_message_or_a_model_that_runs(layout, name, model, tmp_path):
    path = tmp_path / name
    given, _ = weights.approximate(small.make(model), str(path), layout)
    if weights.misfits(given, str(path), layout) or (name == 'x' and model in ('hybrid', 'bit')):
        return
    weights.save(given, str(path), layout)
    file = path / 'model.safetensors' if path.is_dir() else path
    arrays, metadata = array_files.read(str(file))
    rng = np.random.default_rng(0)
    for _ in range(12):
        array_files.write(str(file), mistakes(rng, dict(arrays)), file.suffix, metadata or None)
        try:
            found = weights.load(str(path))
        except UserError:
            continue
        assert np.isfinite(small.logits(found, small.images(given, 1))).all()


@pytest.mark.parametrize('layout', ['timm', 'huggingface', 'vit_jax'])
def test_the_rest_of_images_that_patches_do_not_tile_is_dropped(layout, tmp_path):
    """SigLIP has images of 384 px and patches of 14; the other programs drop the rest as well."""
    given = small.make('vit', gelu='erf')
    given = dataclasses.replace(
        given,
        model=given.model | {'partial_patches': 'drop'},
        preprocess=given.preprocess | {'image_size': (18, 18)},
    )
    path = str(tmp_path / ('x.safetensors' if layout == 'vit_jax' else 'x'))
    weights.save(given, path, layout)
    found = weights.load(path)
    assert found.model == given.model
    assert found.image_size() == (18, 18)
    if layout != 'vit_jax':
        interop.require('transformers')
        interop.import_timm()
        verify.verify(found, found, path, layout)
