import jax
import ml_collections
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.parallel import sharding


def mesh(**sizes):
    sizes = dict(data=1, fsdp=1, tensor=1) | sizes
    return sharding.make_mesh(ml_collections.ConfigDict(sizes))


def test_minus_one_takes_what_is_left():
    assert dict(mesh(data=-1).shape) == {'data': 8, 'fsdp': 1, 'tensor': 1}
    assert dict(mesh(data=-1, tensor=2).shape) == {'data': 4, 'fsdp': 1, 'tensor': 2}
    assert dict(mesh(data=2, fsdp=-1, tensor=2).shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}


@pytest.mark.parametrize(
    'sizes',
    [{'data': 3}, {'data': 16}, {'data': -1, 'fsdp': 3}, {'data': -1, 'fsdp': -1}, {'data': 0}],
)
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(UserError, match='does not fit 8 devices: the sizes must multiply'):
        mesh(**sizes)


def test_bytes_of_a_device():
    grid = mesh(data=4, tensor=2)
    tree = {
        'split': jax.device_put(np.zeros((8, 3), np.float32), sharding.batch_sharding(grid)),
        'whole': jax.device_put(np.zeros(5, np.int8), sharding.replicated(grid)),
    }
    assert sharding.bytes_per_device(tree) == 2 * 3 * 4 + 5


def test_batch_not_divisible_by_devices():
    four = mesh(data=2, fsdp=2, tensor=2)
    with pytest.raises(
        UserError,
        match=r'batch_size 30 is not divisible by 4 devices '
        r'\(data x fsdp\): take 28',
    ):
        sharding.check_batch(30, 1, four)
    with pytest.raises(UserError, match='x 3 accum_steps: take 24'):
        sharding.check_batch(32, 3, four)
    sharding.check_batch(24, 3, four)


def test_where_each_kernel_is_split():
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
    attention, mlp = specs['blocks']['attention'], specs['blocks']['mlp']
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


def test_width_that_fsdp_does_not_divide_takes_another_axis_or_is_named():
    grid = mesh(fsdp=8)
    tree = {
        'mlp': {'dense1': {'kernel': np.zeros((12, 16))}},
        'attention': {'query': {'kernel': np.zeros((12, 3, 4))}},
    }
    specs = jax.tree.map(lambda x: tuple(x.sharding.spec), sharding.abstract(tree, grid))
    assert specs['mlp']['dense1']['kernel'] == (None, 'fsdp')
    assert sharding.unsplit(tree, grid) == ['attention/query/kernel (12, 3, 4)']
