"""Google's files: two generations of names, GroupNorms of one axis or four."""

import numpy as np
import pytest

from tests.support import described, interop, small
from tests.support.interop import timm_model
from tests.support.marks import nightly_but
from tests.support.small import assert_close, assert_same_arrays, through
from vit_jax import weights


@pytest.mark.parametrize('prefix', ['opt/target/', 'params/'])
def test_prefixes_and_newer_names_of_google_are_read(prefix, tmp_path):
    given = small.make('vit')
    _, found = through(given, 'google', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = dict(file)
    assert any('MultiHeadDotProductAttention_1' in name for name in arrays)
    arrays = {
        prefix
        + name.replace('Attention_1', 'Attention_0')
        .replace('Norm_2', 'Norm_1')
        .replace('MlpBlock_3', 'MlpBlock_0'): x
        for name, x in arrays.items()
    }
    np.savez(tmp_path / 'x.npz', **arrays, step=np.int32(3))
    assert_same_arrays(weights.load(str(tmp_path / 'x.npz')).params, found.params)


def test_group_norms_with_one_axis_or_four_are_read(tmp_path):
    _, found = through(small.make('hybrid'), 'google', tmp_path / 'x.npz')
    with np.load(tmp_path / 'x.npz') as file:
        arrays = dict(file)
    assert arrays['gn_root/scale'].shape == (1, 1, 1, 32)
    np.savez(
        tmp_path / 'x.npz',
        **{name: x.ravel() if '/gn' in f'/{name}' else x for name, x in arrays.items()},
    )
    assert_same_arrays(weights.load(str(tmp_path / 'x.npz')).params, found.params)


@pytest.mark.parametrize(
    ('model', 'layout'),
    [
        ('vit', 'google'),
        ('hybrid', 'google'),
        ('bit', 'google'),
        ('map', 'big_vision'),
    ],
)
def test_timm_reads_npz(model, layout, tmp_path):
    """timm's reader of Google's files gives the arrays of an independent conversion."""
    given = small.make(model)
    weights.save(given, str(tmp_path / 'x.npz'), layout)
    theirs = timm_model(given)
    theirs.load_pretrained(str(tmp_path / 'x.npz'))
    found, expected = theirs.state_dict(), interop.to_timm(given.params)
    assert found.keys() == expected.keys()
    assert all((found[n] == x).all() for n, x in expected.items())


@pytest.mark.parametrize('model', nightly_but(['hidden-head'], ['vit', 'gap', 'hidden-head']))
def test_logits_equal_a_plain_flax_model(model, tmp_path):
    given = small.make(model)
    weights.save(given, str(tmp_path / 'x.npz'), 'google')
    batch = small.images(given)
    assert_close(
        described.google_logits(given, tmp_path / 'x.npz', batch), small.logits(given, batch)
    )
