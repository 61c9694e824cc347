"""torchvision's layout, compared with plain PyTorch: no build fits the tested PyTorch."""

import importlib
import importlib.util
import sys

from tests.support import described, interop, small
from tests.support.small import assert_close, assert_same_arrays, through
from vit_jax import weights
from vit_jax.weights import array_files

TORCHVISION = {
    'class_token': (1, 1, 128),
    'conv_proj.weight': (128, 3, 8, 8),
    'conv_proj.bias': (128,),
    'encoder.pos_embedding': (1, 5, 128),
    'encoder.ln.weight': (128,),
    'encoder.ln.bias': (128,),
    'heads.head.weight': (7, 128),
    'heads.head.bias': (7,),
    **{
        f'encoder.layers.encoder_layer_{i}.{name}': shape
        for i in range(2)
        for name, shape in {
            'ln_1.weight': (128,),
            'ln_1.bias': (128,),
            'ln_2.weight': (128,),
            'ln_2.bias': (128,),
            'self_attention.in_proj_weight': (384, 128),
            'self_attention.in_proj_bias': (384,),
            'self_attention.out_proj.weight': (128, 128),
            'self_attention.out_proj.bias': (128,),
            'mlp.0.weight': (96, 128),
            'mlp.0.bias': (96,),
            'mlp.3.weight': (128, 96),
            'mlp.3.bias': (128,),
        }.items()
    },
}


def test_names_and_shapes_are_those_of_torchvision(tmp_path):
    given = small.make('vit', gelu='erf')
    weights.save(given, str(tmp_path / 'x.safetensors'), 'torchvision')
    arrays, _ = array_files.read(str(tmp_path / 'x.safetensors'))
    assert {name: x.shape for name, x in arrays.items()} == TORCHVISION


def test_older_names_of_torchvision_are_read(tmp_path):
    _, found = through(small.make('vit'), 'torchvision', tmp_path / 'x.safetensors')
    arrays, _ = array_files.read(str(tmp_path / 'x.safetensors'))
    arrays = {
        name.replace('mlp.0.', 'mlp.linear_1.').replace('mlp.3.', 'mlp.linear_2.'): x
        for name, x in arrays.items()
    }
    array_files.write(str(tmp_path / 'x.safetensors'), arrays, '.safetensors')
    assert_same_arrays(weights.load(str(tmp_path / 'x.safetensors')).params, found.params)


def test_logits_equal_a_plain_pytorch_model(tmp_path):
    given = small.make('vit', gelu='erf')
    path = str(tmp_path / 'x.safetensors')
    weights.save(given, path, 'torchvision')
    batch = small.images(given)
    assert_close(described.torchvision_logits(given, path, batch), small.logits(given, batch))


def test_the_replacement_of_torchvision_is_temporary(monkeypatch):
    for name in [n for n in sys.modules if n.partition('.')[0] == 'torchvision']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, 'path', [])  # nothing is installed
    importlib.invalidate_caches()
    with interop.torchvision_or_stand_in():
        assert isinstance(importlib.import_module('torchvision.ops'), interop.AnyName)
    assert importlib.util.find_spec('torchvision') is None
    assert not any(n.partition('.')[0] == 'torchvision' for n in sys.modules)


def test_an_installed_torchvision_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / 'torchvision').mkdir()
    (tmp_path / 'torchvision/__init__.py').write_text("__version__ = 'installed'")
    for name in [n for n in sys.modules if n.partition('.')[0] == 'torchvision']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with interop.torchvision_or_stand_in():
        assert importlib.import_module('torchvision').__version__ == 'installed'
    assert sys.modules.pop('torchvision').__version__ == 'installed'
