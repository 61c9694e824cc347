"""Tables: names and axes in both directions, problems by name, stacked and single layers."""

import numpy as np
import pytest

from tests.support import small
from tests.support.errors import refused
from vit_jax.weights import table
from vit_jax.weights.model import flatten
from vit_jax.weights.table import Entry

ENTRIES = [
    Entry(('a/{s}/{j}/x', 'a/{s}/{j}/y'), 'A{s1}.{j1:02}.weight', 'dense'),
    Entry(('b',), 'B'),
]


def test_names_and_axes_are_translated():
    x, y = np.arange(6).reshape(2, 3), np.arange(8).reshape(2, 4)
    ours = {'a/0/9/x': x, 'a/0/9/y': y, 'b': np.ones(2)}
    theirs = table.to_theirs(ours, ENTRIES)
    assert theirs.keys() == {'A1.10.weight', 'B'}
    np.testing.assert_array_equal(theirs['A1.10.weight'], np.concatenate([x.T, y.T]))
    found, unknown = table.translate(theirs | {'C': np.ones(3)}, ENTRIES)
    assert unknown == ['C']
    assert [entry.ours for entry, _ in found] == [('a/0/9/x', 'a/0/9/y'), ('b',)]


def test_arrays_that_do_not_fit_are_listed():
    found, unknown = table.translate({'A1.01.weight': np.ones((5, 2)), 'C': np.ones(3)}, ENTRIES)
    templates = {
        'a/0/0/x': np.empty((2, 3)),
        'a/0/0/y': np.empty((2, 3)),
        'b': np.empty(2),
        'c': np.empty(3),
    }
    with refused('content') as error:
        table.fit(found, unknown, templates, ENTRIES)
    assert str(error.value).splitlines()[1:] == [
        '  no place for C',
        '  A1.01.weight has shape (5, 2), expected (6, 2)',
        '  no B',
        '  no c',
    ]
    with refused('inapplicable'):
        table.to_theirs({'b': np.ones(2), 'c': np.ones(3)}, ENTRIES)


def test_entries_within_a_prefix():
    block = ('blocks/{i}/', 'b{i}.')
    assert table.entries({'x': 'y'}, 'flat', within=block) == [
        Entry(('blocks/{i}/x',), 'b{i}.y', 'flat')
    ]
    assert table.torch_modules({'norm1': 'n', 'a/query key': 'qk'}, within=block) == [
        Entry(('blocks/{i}/norm1/scale',), 'b{i}.n.weight'),
        Entry(('blocks/{i}/norm1/bias',), 'b{i}.n.bias'),
        Entry(
            ('blocks/{i}/a/query/kernel', 'blocks/{i}/a/key/kernel'), 'b{i}.qk.weight', 'to_heads'
        ),
        Entry(('blocks/{i}/a/query/bias', 'blocks/{i}/a/key/bias'), 'b{i}.qk.bias', 'flat'),
    ]
    assert table.flax_modules({'norm1': 'gn'}, 'four_axes', within=('r/', 's/')) == [
        Entry(('r/norm1/scale',), 's/gn/scale', 'four_axes'),
        Entry(('r/norm1/bias',), 's/gn/bias', 'four_axes'),
    ]


def test_modules_of_pytorch_become_entries():
    assert table.torch_modules({'norm': 'ln', 'x/query key': 'in_proj_'}) == [
        Entry(('norm/scale',), 'ln.weight'),
        Entry(('norm/bias',), 'ln.bias'),
        Entry(('x/query/kernel', 'x/key/kernel'), 'in_proj_weight', 'to_heads'),
        Entry(('x/query/bias', 'x/key/bias'), 'in_proj_bias', 'flat'),
    ]
    kinds = {
        name: table.torch_modules({name: 'x'})[0].kind
        for name in (
            'embedding',
            'resnet/root_conv',
            'blocks/{i}/attention/out',
            'blocks/{i}/mlp/dense1',
        )
    }
    assert list(kinds.values()) == ['conv', 'conv', 'from_heads', 'dense']


@pytest.mark.parametrize('model', ['vit', 'hybrid', 'bit'])
def test_stacking_inverts_unstacking(model):
    flat = flatten(small.make(model).params)
    again = table.stack(table.unstack(flat), flat)
    assert again.keys() == flat.keys()
    assert all((again[name] == x).all() for name, x in flat.items())
