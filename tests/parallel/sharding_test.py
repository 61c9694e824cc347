"""The mesh and the shardings of parameters and batches."""

import jax
import ml_collections
import numpy as np
import pytest

from tests.support.errors import refused
from vit_jax.parallel import sharding


def mesh(**sizes):
    sizes = dict(data=1, fsdp=1, tensor=1) | sizes
    return sharding.make_mesh(ml_collections.ConfigDict(sizes))


def test_minus_one_means_all_remaining_devices():
    assert dict(mesh(data=-1).shape) == {'data': 8, 'fsdp': 1, 'tensor': 1}
    assert dict(mesh(data=-1, tensor=2).shape) == {'data': 4, 'fsdp': 1, 'tensor': 2}
    assert dict(mesh(data=2, fsdp=-1, tensor=2).shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}


@pytest.mark.parametrize(
    'sizes',
    [{'data': 3}, {'data': 16}, {'data': -1, 'fsdp': 3}, {'data': -1, 'fsdp': -1}, {'data': 0}],
)
def test_sizes_that_do_not_fit_the_devices_are_errors(sizes):
    all_sizes = dict(data=1, fsdp=1, tensor=1) | sizes
    with refused('value', field='mesh', value=all_sizes) as caught:
        mesh(**sizes)
    assert str(caught.value) == (
        f'mesh {all_sizes} does not fit 8 devices: the sizes must multiply to that number; one of '
        'them may be -1 for all remaining devices.'
    )


def test_bytes_per_device_follow_the_shardings():
    grid = mesh(data=4, tensor=2)
    tree = {
        'split': jax.device_put(np.zeros((8, 3), np.float32), sharding.batch_sharding(grid)),
        'whole': jax.device_put(np.zeros(5, np.int8), sharding.replicated(grid)),
    }
    assert sharding.bytes_per_device(tree) == 2 * 3 * 4 + 5


def test_a_batch_must_be_divisible_by_devices_and_accum_steps():
    four = mesh(data=2, fsdp=2, tensor=2)
    with refused('value', field='batch_size', value=30) as caught:
        sharding.check_batch(30, 1, four)
    assert ': use 28, or other devices.' in str(caught.value)
    with refused('value', field='batch_size', value=32) as caught:
        sharding.check_batch(32, 3, four)
    assert ' x 3 accum_steps: use 24, or other devices.' in str(caught.value)
    sharding.check_batch(24, 3, four)


def test_tensor_axis_must_divide_heads_and_mlps():
    grid = mesh(data=2, tensor=4)
    sharding.check_model({'num_heads': 8, 'mlp_dim': 64}, grid)
    with refused('value', field='model.num_heads', value=6):
        sharding.check_model({'num_heads': 6, 'mlp_dim': 64}, grid)
    with refused('value', field='teacher.mlp_dim', value=66):
        sharding.check_model({'num_heads': 8, 'mlp_dim': 66}, grid, 'teacher')
    with refused('inapplicable', field='mesh.tensor', value=4):
        sharding.check_model({}, grid)


def test_each_kernel_is_split_along_the_axes_of_the_table():
    grid = mesh(data=2, fsdp=2, tensor=2)
    tree = {
        'blocks': {
            'attention': {
                'query': {'kernel': np.zeros((3, 4, 2, 6)), 'bias': np.zeros((3, 2, 6))},
                'out': {'kernel': np.zeros((3, 2, 6, 4))},
            },
            'mlp': {
                'dense1': {'kernel': np.zeros((3, 4, 8)), 'bias': np.zeros((3, 8))},
                'dense2': {'kernel': np.zeros((3, 8, 4)), 'bias': np.zeros((3, 4))},
            },
            'norm1': {'scale': np.zeros((3, 4))},
        },
        'embedding': {'kernel': np.zeros((2, 2, 3, 4))},
        'head': {'kernel': np.zeros((4, 5)), 'bias': np.zeros(5)},
        'patch_head': {'kernel': np.zeros((4, 6))},
    }
    specs = jax.tree.map(lambda x: tuple(x.sharding.spec), sharding.abstract(tree, grid))
    attention = specs['blocks']['attention']
    mlp = specs['blocks']['mlp']
    assert attention['query'] == {
        'kernel': (None, 'fsdp', 'tensor', None),
        'bias': (None, 'tensor', None),
    }
    assert attention['out']['kernel'] == (None, 'tensor', None, 'fsdp')
    assert mlp == {
        'dense1': {'kernel': (None, 'fsdp', 'tensor'), 'bias': (None, 'tensor')},
        'dense2': {'kernel': (None, 'tensor', 'fsdp'), 'bias': (None, None)},
    }
    assert specs['blocks']['norm1']['scale'] == (None, None)
    assert specs['embedding']['kernel'] == (None, None, None, 'fsdp')
    assert specs['head'] == {'kernel': ('fsdp', None), 'bias': (None,)}
    assert specs['patch_head'] == {'kernel': ('fsdp', None)}


def test_fsdp_splits_another_axis_of_a_width_that_it_does_not_divide_or_reports_it():
    grid = mesh(fsdp=8)
    tree = {
        'mlp': {'dense1': {'kernel': np.zeros((12, 16))}},
        'attention': {'query': {'kernel': np.zeros((12, 3, 4))}},
    }
    specs = jax.tree.map(lambda x: tuple(x.sharding.spec), sharding.abstract(tree, grid))
    assert specs['mlp']['dense1']['kernel'] == (None, 'fsdp')
    assert sharding.unsplit(tree, grid) == ['attention/query/kernel (12, 3, 4)']
