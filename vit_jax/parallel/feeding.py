"""How batches reach the devices: the part that a process reads, and the time of the copy."""

import collections
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from vit_jax.errors import UserError
from vit_jax.parallel import sharding

LOOKAHEAD = 1  # batches that `feed` copies to the devices ahead of the loop
# Batches on the devices in addition to the batch of the running step. While this step runs, the
# loop already requests the next batch.
BATCHES_UNDER_WAY = LOOKAHEAD + 1


def data_share(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """The part of every batch that a process reads: (index of the part, number of parts).

    If the tensor axis spans processes, their devices have the same examples, and these processes
    read the same part.

    Args:
      process: the index of the process; None stands for this process.

    Raises:
      UserError: if the parts of the processes are unequal or overlap.
    """
    if process is None:
        process = jax.process_index()
    devices_by_row = mesh.devices.reshape(sharding.batch_parts(mesh), -1)
    rows_of_process = collections.defaultdict(set)
    for (row, _), device in np.ndenumerate(devices_by_row):
        rows_of_process[device.process_index].add(row)
    parts = sorted(set(map(frozenset, rows_of_process.values())), key=min)
    overlap = sum(map(len, parts)) != len(devices_by_row)
    are_unequal = len(set(map(len, parts))) > 1
    if overlap or are_unequal:
        raise UserError(
            f'mesh {dict(mesh.shape)} gives {len(rows_of_process)} processes unequal parts of a '
            'batch: expected mesh.tensor to divide the number of devices of a process, or to be a '
            'multiple of it.',
            kind='value',
            field='mesh.tensor',
            value=mesh.shape['tensor'],
        )
    return parts.index(frozenset(rows_of_process[process])), len(parts)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copies whole arrays, which every process has, to all devices."""
    return jax.make_array_from_process_local_data(sharding.replicated(mesh), tree)


def feed(batches: Iterable[PyTree], mesh: Mesh) -> Iterator[PyTree]:
    """Batches as global arrays on the mesh, copied LOOKAHEAD batches ahead.

    Args:
      batches: the rows [local, ...] of this process.
    """
    ahead = []
    for batch in batches:
        ahead.append(jax.make_array_from_process_local_data(sharding.batch_sharding(mesh), batch))
        if len(ahead) > LOOKAHEAD:
            yield ahead.pop(0)
    yield from ahead
