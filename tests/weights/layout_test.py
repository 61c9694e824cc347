"""Every layout is exact in both directions, or names the fields that it cannot store."""

import dataclasses
import itertools

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.support import small
from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.small import FILES, PATHS, assert_same_arrays, position_in_class_token, through
from vit_jax import weights

# One model for each group of arrays that a layout names.
OFTEN = (
    'vit',
    'map',
    'headless',
    'hidden-head',
    'registers-gap',
    'clip',
    'layer-scale',
    'hybrid',
    'bit',
    'axial',
    'axial-resnet',
)
HOLDS = {
    'vit': PATHS,
    'gap': ('google', 'big_vision', 'timm', 'vit_jax'),
    'map': ('big_vision', 'timm', 'vit_jax'),
    'headless': PATHS,
    'hidden-head': ('google', 'big_vision', 'torchvision', 'vit_jax'),
    'registers': ('timm', 'vit_jax'),
    'registers-gap': ('timm', 'vit_jax'),
    'clip': ('timm', 'vit_jax'),
    'layer-scale': ('timm', 'vit_jax'),
    'no-position': ('timm', 'vit_jax'),
    'sincos': ('big_vision', 'vit_jax'),
    'rectangle': ('google', 'big_vision', 'timm', 'huggingface', 'vit_jax'),
    'root': ('google', 'timm', 'vit_jax'),
    'hybrid': ('google', 'timm', 'vit_jax'),
    'bit': ('google', 'big_vision', 'timm', 'vit_jax'),
    'parallel': ('vit_jax',),
    'axial': ('vit_jax',),
    'axial-resnet': ('vit_jax',),
}


@pytest.mark.parametrize(('layout', 'name'), FILES, ids=lambda x: x)
@pytest.mark.parametrize('model', nightly_but(OFTEN, small.MODELS))
def test_models_are_read_back_as_they_were_written(model, layout, name, tmp_path):
    path = tmp_path / name
    given = small.make(model)
    unnamed = (layout, name) == ('timm', 'x') and 'resnet' in small.MODELS[model]
    if layout not in HOLDS[model] or unnamed:
        given, _ = weights.approximate(given, str(path), layout)
        with refused('inapplicable', field='layout', file=path, value=layout):
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


@pytest.mark.nightly
@pytest.mark.parametrize(('first', 'second'), list(itertools.permutations(PATHS, 2)))
def test_every_pair_of_layouts_is_exact(first, second, tmp_path):
    """A file of one layout, written in another one and back, is the same file."""
    (tmp_path / 'a').mkdir(), (tmp_path / 'b').mkdir(), (tmp_path / 'c').mkdir()
    given = small.make('vit')
    if second == 'big_vision':
        given = position_in_class_token(given)
    _, a = through(given, first, tmp_path / 'a' / PATHS[first])
    _, b = through(a, second, tmp_path / 'b' / PATHS[second])
    _, c = through(b, first, tmp_path / 'c' / PATHS[first])
    assert_same_arrays(b.params, a.params)
    assert_same_arrays(c.params, a.params)
    if first != 'vit_jax':  # its file also states fields that the second layout may not store
        written = [p for p in (tmp_path / 'a').rglob('*') if p.suffix in ('.npz', '.safetensors')]
        assert len(written) == 1
        for file in written:
            again = tmp_path / 'c' / file.relative_to(tmp_path / 'a')
            assert file.read_bytes() == again.read_bytes()


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16], ids=['float16', 'bfloat16'])
@pytest.mark.parametrize(('layout', 'name'), FILES, ids=lambda x: x)
def test_dtypes_are_kept(layout, name, dtype, tmp_path):
    given = small.make('vit')
    given = dataclasses.replace(given, params=jax.tree.map(lambda x: x.astype(dtype), given.params))
    if (layout, dtype) == ('google', ml_dtypes.bfloat16):
        assert "Google's code and timm cannot read them" in small.message(
            weights.save, given, str(tmp_path / name), layout
        )
        return
    if layout == 'big_vision':
        given = position_in_class_token(given)
    given, found = through(given, layout, tmp_path / name)
    assert_same_arrays(found.params, given.params)
