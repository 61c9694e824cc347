from types import SimpleNamespace
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.parallel import feeding, sharding


def mesh(**sizes):
    sizes = dict(data=1, fsdp=1, tensor=1) | sizes
    return sharding.make_mesh(ml_collections.ConfigDict(sizes))


def test_batch_is_spread_in_order_and_tensor_devices_hold_the_same():
    x = np.arange(8.0)
    grid = mesh(data=2, fsdp=2, tensor=2)
    y = next(feeding.feed(iter([{'x': x}]), grid))['x']
    by_device = {s.device: s.data.tolist() for s in y.addressable_shards}
    assert [[by_device[d] for d in pair] for pair in grid.devices.reshape(4, 2)] == [
        [[0, 1]] * 2,
        [[2, 3]] * 2,
        [[4, 5]] * 2,
        [[6, 7]] * 2,
    ]
    np.testing.assert_array_equal(jax.device_get(y), x)


def test_fed_batches_are_the_same_and_made_ahead():
    """While a step runs the next batch is asked for: then so many more than the step's exist."""
    made = []

    def batches():
        for i in range(5):
            made.append(i)
            yield {'x': np.full(8, i, np.float32)}

    fed = feeding.feed(batches(), mesh(data=-1))
    first = next(fed)
    assert len(made) == 1 + feeding.LOOKAHEAD
    following = next(fed)
    assert len(made) == 1 + feeding.BATCHES_UNDER_WAY
    for i, batch in enumerate([first, following, *fed]):
        assert batch['x'].tolist() == [i] * 8
        assert len(batch['x'].sharding.device_set) == 8
    assert made == [0, 1, 2, 3, 4]


class Device(NamedTuple):
    """What data_share asks a device for."""

    id: int
    process_index: int


def mesh_of_processes(processes, **sizes):
    """A mesh of 8 devices that belong to `processes` processes in order."""
    grid = np.empty(8, object)
    grid[:] = [Device(i, i * processes // 8) for i in range(8)]
    shape = dict(data=1, fsdp=1, tensor=1) | sizes
    return SimpleNamespace(devices=grid.reshape(*shape.values()), shape=shape)


@pytest.mark.parametrize(
    ('processes', 'sizes', 'shares'),
    [
        (4, dict(data=8), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, dict(data=2, fsdp=4), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, dict(data=4, tensor=2), [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (4, dict(fsdp=2, tensor=4), [(0, 2), (0, 2), (1, 2), (1, 2)]),  # tensor over two processes
        (8, dict(tensor=8), [(0, 1)] * 8),
    ],
)
def test_processes_that_hold_the_same_examples_read_the_same(processes, sizes, shares):
    grid = mesh_of_processes(processes, **sizes)
    assert [feeding.data_share(grid, p) for p in range(processes)] == shares


def test_tensor_axis_across_the_edge_of_a_process():
    grid = mesh_of_processes(4, data=4, tensor=2)
    grid.devices = np.roll(grid.devices.reshape(-1), 1).reshape(4, 1, 2)
    with pytest.raises(UserError, match='unequal parts of a batch'):
        feeding.data_share(grid, 0)
