"""Models that a layout cannot store, and files that cannot be written."""

import dataclasses
import os

import pytest

from tests.support import interop, small
from tests.support.errors import refused
from tests.support.small import assert_same_arrays, through
from vit_jax import weights
from vit_jax.weights import array_files


@pytest.mark.parametrize(
    ('model', 'layout', 'name', 'expected'),
    [
        ('vit', 'torchvision', 'x.pth', "model.gelu is 'tanh': the layout requires 'erf'"),
        ('vit', 'timm', 'x.pth', "model.gelu is 'tanh': the layout requires 'erf'"),
        ('hybrid', 'torchvision', 'x.pth', 'model.resnet is {'),
        ('rectangle', 'torchvision', 'x.pth', 'images of 16x12 with 5 channels and patches of 8x4'),
        (
            'hybrid',
            'timm',
            'x.pth',
            'model.resnet.weight_epsilon is 1e-05: the layout requires 1e-08',
        ),
        ('bit', 'huggingface', 'x', "model.resnet is {'units': (2, 1, 3)"),
        ('axial', 'google', 'x.npz', "model.attention is 'axial': the layout requires 'full'"),
    ],
)
def test_models_that_a_layout_cannot_store_are_refused(
    model, layout, name, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    given = small.make(model, gelu='erf') if model == 'rectangle' else small.make(model)
    with refused('inapplicable', field='layout', file=name, value=layout) as error:
        weights.save(given, name, layout)
    assert expected in str(error.value)
    assert not any(tmp_path.iterdir())


def test_message_about_a_model_that_a_layout_cannot_store(tmp_path):
    with refused('inapplicable') as error:
        weights.save(small.make('vit'), str(tmp_path / 'x.pth'), 'timm')
    assert str(error.value) == (
        "layout timm cannot store this model:\n  model.gelu is 'tanh': the layout requires 'erf'"
    )


def test_unknown_layouts_and_other_endings_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused('choice', field='layout', value='tim'):
        weights.save(small.make('vit'), 'x.npz', 'tim')
    for layout, name, expected in [
        ('google', 'x.pth', 'a name ending in .npz'),
        ('huggingface', 'x.npz', 'a directory, without such an ending'),
    ]:
        with refused('value', file=name) as error:
            weights.save(small.make('vit'), name, layout)
        assert str(error.value) == f'{name!r} cannot be in layout {layout}: expected {expected}.'
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
def test_a_directory_states_how_images_are_prepared(layout, tmp_path, caplog):
    """Without it, timm would use ImageNet's mean and bicubic resizing, and transformers nothing."""
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
def test_area_becomes_box_of_pillow_with_a_warning(layout, tmp_path, caplog):
    """The filters differ unless each new pixel consists of whole old pixels."""
    given = small.make('vit')
    change = {'resize': 'area', 'uint8_resize': False}
    by_area = dataclasses.replace(given, preprocess=given.preprocess | change)
    weights.save(by_area, str(tmp_path / 'x'), layout)
    assert "preprocess.resize is 'area', but the program averages whole pixels (box)" in caplog.text
    found = weights.load(str(tmp_path / 'x')).preprocess
    assert found == by_area.preprocess | {
        'resize': 'box',
        'fit': found['fit'],
        'uint8_resize': True,
    }


def test_a_directory_may_have_further_texts(tmp_path):
    path = tmp_path / 'x'
    weights.save(small.make('vit'), path, 'timm', {'README.md': 'first'})
    assert (path / 'README.md').read_text() == 'first'
    with refused('conflict', file=path):  # the text is not lost silently
        weights.save(small.make('vit'), path, 'timm')
    weights.save(small.make('vit'), path, 'timm', {'README.md': 'second'})
    assert (path / 'README.md').read_text() == 'second'
    assert weights.load(path).layout == 'timm'


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / 'x.npz'
    _, before = through(small.make('vit'), 'google', path)

    def fail(*_, **__):
        path.with_name('x.npz.half').write_text('')
        raise OSError('disk full')

    monkeypatch.setattr(array_files, 'write', fail)
    with refused('unwritable', file=path):
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
