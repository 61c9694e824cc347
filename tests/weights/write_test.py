"""Models that a layout cannot hold, and files that cannot be written."""

import dataclasses
import os

import pytest

from tests.support import interop, small
from tests.support.errors import refused
from tests.support.small import assert_same_arrays, message, through
from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.weights import array_files


@pytest.mark.parametrize(
    ('model', 'layout', 'name', 'expected'),
    [
        ('vit', 'torchvision', 'x.pth', "model.gelu is 'tanh', there it is 'erf'"),
        ('vit', 'timm', 'x.pth', "model.gelu is 'tanh', there it is 'erf'"),
        ('hybrid', 'torchvision', 'x.pth', 'model.resnet is {'),
        ('rectangle', 'torchvision', 'x.pth', 'images of 16x12 with 5 channels and patches of 8x4'),
        ('hybrid', 'timm', 'x.pth', 'model.resnet.weight_epsilon is 1e-05, there it is 1e-08'),
        ('bit', 'huggingface', 'x', "model.resnet is {'units': (2, 1, 3)"),
        ('axial', 'google', 'x.npz', "model.attention is 'axial', there it is 'full'"),
        (
            'vit',
            'google',
            'x.pth',
            "'x.pth' cannot hold layout google: expected a name ending in .npz",
        ),
        ('vit', 'huggingface', 'x.npz', 'expected a directory, without such an ending.'),
        ('vit', 'tim', 'x.npz', "layout is 'tim'. Did you mean timm"),
    ],
)
def test_layouts_that_cannot_hold_a_model(model, layout, name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = small.make(model, gelu='erf') if model == 'rectangle' else small.make(model)
    assert expected in message(weights.save, given, name, layout)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('layout', 'name'), [('vit_jax', 'x.safetensors'), ('timm', 'x'), ('google', 'x.npz')]
)
def test_files_have_the_mode_of_the_user(layout, name, tmp_path):
    old = os.umask(0o027)
    try:
        weights.save(small.make('vit'), str(tmp_path / name), layout)
    finally:
        os.umask(old)
    written = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in written} == {'0o640'}


@pytest.mark.parametrize('layout', ['timm', 'huggingface'])
def test_a_directory_says_how_images_are_prepared(layout, tmp_path, caplog):
    """Or timm would take ImageNet's mean and bicubic, and Hugging Face nothing."""
    bare = dataclasses.replace(small.make('vit'), preprocess=None)
    weights.save(bare, str(tmp_path / 'x'), layout)
    assert (
        'vit does not say antialias, crop_ratio, fit, mean, resize, std, uint8_resize of images'
        in caplog.text
    )
    found = weights.load(str(tmp_path / 'x')).preprocess
    assert (found['mean'], found['std'], found['resize']) == ((0.5,) * 3, (0.5,) * 3, 'bilinear')
    assert found['uint8_resize'] is True


@pytest.mark.parametrize('layout', ['timm', 'huggingface'])
def test_means_over_areas_become_pillow_s_box_with_a_warning(layout, tmp_path, caplog):
    """Which is another filter, but where a pixel is whole ones, and so is refused."""
    given = small.make('vit')
    change = {'resize': 'area', 'uint8_resize': False}
    by_area = dataclasses.replace(given, preprocess=given.preprocess | change)
    weights.save(by_area, str(tmp_path / 'x'), layout)
    assert "preprocess.resize is 'area', and there whole pixels are averaged (box)" in caplog.text
    found = weights.load(str(tmp_path / 'x')).preprocess
    assert found == by_area.preprocess | {
        'resize': 'box',
        'fit': found['fit'],
        'uint8_resize': True,
    }


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / 'x.npz'
    _, before = through(small.make('vit'), 'google', path)

    def fail(*_, **__):
        path.with_name('x.npz.half').write_text('')
        raise OSError('disk full')

    monkeypatch.setattr(array_files, 'write', fail)
    with pytest.raises(UserError, match='x.npz cannot be written .disk full'):
        weights.save(before, str(path), 'google')
    assert_same_arrays(weights.load(str(path)).params, before.params)


@pytest.mark.parametrize(
    ('layout', 'name', 'gelu'),
    [
        ('vit_jax', 'x.safetensors', 'tanh'),
        ('google', 'x.npz', 'tanh'),
        ('timm', 'x.pth', 'erf'),
        ('timm', 'x', 'erf'),
    ],
)
def test_a_full_disk_is_an_error_of_the_file(layout, name, gelu, tmp_path, limited_files):
    """A command shows it as one message; no part of the file is left."""
    if name == 'x.pth':
        interop.require('torch')
    with limited_files(3000), refused('unwritable', file=tmp_path / name):
        weights.save(small.make('vit', gelu=gelu), str(tmp_path / name), layout)
    assert not any(tmp_path.iterdir())
