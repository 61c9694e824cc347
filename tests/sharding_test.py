import jax
import ml_collections
import numpy as np
import pytest

from vit_jax import sharding
from vit_jax.errors import UserError


def mesh(**sizes):
    return sharding.make_mesh(ml_collections.ConfigDict(sizes))


def test_minus_one_takes_what_is_left():
    assert dict(mesh(data=-1).shape) == {'data': 4}
    assert dict(mesh(data=-1, other=2).shape) == {'data': 2, 'other': 2}


@pytest.mark.parametrize('sizes', [{'data': 3}, {'data': 8}, {'data': -1, 'other': 3},
                                   {'data': -1, 'other': -1}, {'data': 0}])
def test_sizes_that_do_not_fit(sizes):
    with pytest.raises(UserError, match='does not fit 4 devices: the sizes must multiply'):
        mesh(**sizes)


def test_batch_is_spread_in_order():
    x = np.arange(8.0)
    y = sharding.shard_batch({'x': x}, sharding.batch_sharding(mesh(data=4)))['x']
    assert [s.data.tolist() for s in y.addressable_shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    np.testing.assert_array_equal(jax.device_get(y), x)


def test_batch_not_divisible_by_devices():
    with pytest.raises(UserError, match='batch_size 30 is not divisible by 4 devices. The nearest '
                                        'that is: 28'):
        sharding.check_batch(30, 1, mesh(data=4))
    with pytest.raises(UserError, match='by 4 devices x 3 accum_steps. The nearest that is: 24'):
        sharding.check_batch(32, 3, mesh(data=4))
    sharding.check_batch(24, 3, mesh(data=4))
