"""Models that a layout cannot hold, and files that cannot be written."""

import pytest

from tests.support import small
from tests.support.small import assert_same_arrays, message, through
from vit_jax import weights
from vit_jax.weights import files


@pytest.mark.parametrize(('model', 'layout', 'name', 'expected'), [
    ('vit', 'torchvision', 'x.pth', "model.gelu is 'tanh', there it is 'erf'"),
    ('vit', 'timm', 'x.pth', "model.gelu is 'tanh', there it is 'erf'"),
    ('hybrid', 'torchvision', 'x.pth', "model.resnet is {"),
    ('rectangle', 'torchvision', 'x.pth', 'images of 16x12 with 5 channels and patches of 8x4'),
    ('hybrid', 'timm', 'x.pth', 'model.resnet.weight_epsilon is 1e-05, there it is 1e-08'),
    ('bit', 'huggingface', 'x', "model.resnet is {'units': (2, 1, 3)"),
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


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / 'x.npz'
    _, before = through(small.make('vit'), 'google', path)

    def fail(*_, **__):
        path.with_name('x.npz.half').write_text('')
        raise OSError('disk full')

    monkeypatch.setattr(files, 'write', fail)
    with pytest.raises(OSError, match='disk full'):
        weights.save(before, str(path), 'google')
    assert_same_arrays(weights.load(str(path)).params, before.params)
