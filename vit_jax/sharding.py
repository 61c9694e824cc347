"""The device mesh and how arrays lie on it."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax.errors import UserError


def make_mesh(config: ConfigDict, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `config.mesh` over all devices, one axis per field.

    Args:
      config: `config.mesh`: devices per axis; one may be -1 and takes what is left.
      devices: default all devices of all processes.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(config)
    given = 1
    for size in sizes.values():
        given *= size if size != -1 else 1
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) == 1 and given > 0 and len(devices) % given == 0:
        sizes[free[0]] = len(devices) // given
    elif free or given != len(devices):
        raise UserError(f'mesh {sizes} does not fit {len(devices)} devices: the sizes must '
                        'multiply to that number, and one of them may be -1 to take what is left.')
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices,
                         axis_types=(AxisType.Auto,) * len(sizes))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples are spread over the data axis."""
    return NamedSharding(mesh, PartitionSpec('data'))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(batch_size: int, accum_steps: int, mesh: Mesh) -> None:
    """Raises UserError unless every device gets the same number of examples in every part."""
    parts = mesh.shape['data'] * max(accum_steps, 1)
    if batch_size % parts:
        near = max(parts, batch_size // parts * parts)
        accumulated = f' x {accum_steps} accum_steps' if accum_steps > 1 else ''
        raise UserError(f'batch_size {batch_size} is not divisible by {mesh.shape["data"]} '
                        f'devices{accumulated}. The nearest that is: {near}.')


def shard_batch(batch: PyTree, sharding: NamedSharding) -> PyTree:
    """Puts this process's rows [local, ...] of a batch on its devices, as a global array."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)
