"""Batches on the devices: their order, the copies made ahead, and the parts of processes."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
import pytest

from tests.support.errors import refused
from vit_jax.parallel import feeding, sharding


def mesh(**sizes):
    sizes = dict(data=1, fsdp=1, tensor=1) | sizes
    return sharding.make_mesh(ml_collections.ConfigDict(sizes))


def test_a_batch_is_split_in_order_and_devices_of_the_tensor_axis_have_equal_examples():
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


def test_fed_batches_are_unchanged_and_copied_ahead():
    """While a step runs, the loop requests the next batch: BATCHES_UNDER_WAY more exist then."""
    read = []

    def batches():
        for i in range(5):
            read.append(i)
            yield {'x': np.full(8, i, np.float32)}

    fed = feeding.feed(batches(), mesh(data=-1))
    first = next(fed)
    assert len(read) == 1 + feeding.LOOKAHEAD
    following = next(fed)
    assert len(read) == 1 + feeding.BATCHES_UNDER_WAY
    for i, batch in enumerate([first, following, *fed]):
        assert batch['x'].tolist() == [i] * 8
        assert len(batch['x'].sharding.device_set) == 8
    assert read == [0, 1, 2, 3, 4]


class Device(NamedTuple):
    """The attributes of a device that data_share reads."""

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
def test_processes_with_the_same_examples_read_the_same_part(processes, sizes, shares):
    grid = mesh_of_processes(processes, **sizes)
    assert [feeding.data_share(grid, p) for p in range(processes)] == shares


def test_a_tensor_axis_across_a_process_boundary_is_an_error():
    grid = mesh_of_processes(4, data=4, tensor=2)
    grid.devices = np.roll(grid.devices.reshape(-1), 1).reshape(4, 1, 2)
    with refused('value', field='mesh.tensor', value=2):
        feeding.data_share(grid, 0)
