"""How batches reach the devices: which part a process reads, and when it is copied."""

import collections
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from vit_jax.errors import UserError
from vit_jax.parallel import sharding

LOOKAHEAD = 1  # batches that `feed` puts on the devices before they are asked for
# Batches on the devices besides that of the running step: the next one is asked for meanwhile.
BATCHES_UNDER_WAY = LOOKAHEAD + 1


def data_share(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """Which part of every batch a process, by default this one, reads: (index, number of parts).

    Processes whose devices hold the same examples, because the tensor axis spans them, read the
    same part. Raises UserError when processes hold unequal parts, or parts that overlap.
    """
    process = jax.process_index() if process is None else process
    rows = mesh.devices.reshape(sharding.batch_parts(mesh), -1)
    of_process = collections.defaultdict(set)
    for (row, _), device in np.ndenumerate(rows):
        of_process[device.process_index].add(row)
    shares = sorted(set(map(frozenset, of_process.values())), key=min)
    if sum(map(len, shares)) != len(rows) or len(set(map(len, shares))) > 1:
        raise UserError(
            f'mesh {dict(mesh.shape)} gives {len(of_process)} processes unequal parts '
            'of a batch: let mesh.tensor divide the devices of a process, or be a '
            'multiple of them.'
        )
    return shares.index(frozenset(of_process[process])), len(shares)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts arrays that every process has on all devices, whole."""
    return jax.make_array_from_process_local_data(sharding.replicated(mesh), tree)


def feed(batches: Iterable[PyTree], mesh: Mesh) -> Iterator[PyTree]:
    """Batches as global arrays on the mesh, LOOKAHEAD of them made ahead.

    Those that are given have the rows [local, ...] of this process.
    """
    ahead = []
    for batch in batches:
        ahead.append(jax.make_array_from_process_local_data(sharding.batch_sharding(mesh), batch))
        if len(ahead) > LOOKAHEAD:
            yield ahead.pop(0)
    yield from ahead
