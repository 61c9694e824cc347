"""Makes decisions that could otherwise differ between processes once, for all processes.

All processes must call these functions in the same order, and each call waits for the others. A
single process sends nothing and does not use JAX's devices.
"""

import json
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from vit_jax.errors import UserError, some

SHOWN = 20  # number of differences in one message


def count() -> int:
    """Number of processes."""
    if jax.distributed.is_initialized():
        return jax.process_count()
    return 1


def is_main() -> bool:
    """Whether this is process 0, the only process that writes logs, metrics and the config."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gather(value: Any) -> list:
    """Sends the values of all processes to all processes, as JSON over the devices.

    Returns:
      [value of process 0, value of process 1, ...], the same list on every process.
    """
    if count() == 1:
        return [value]
    text = np.frombuffer(json.dumps([jax.process_index(), value]).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    # All processes need the same length, and JAX compiles the transfer once for each length:
    # powers of two keep their number low.
    padded = np.zeros(2 ** int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: text.size] = text
    texts = multihost_utils.process_allgather(padded)
    values = dict(
        json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)
    )
    return [values[process] for process in sorted(values)]


def from_main(function: Callable[[], Any]) -> Any:
    """Calls `function` on process 0 and returns its result, or raises its UserError, everywhere.

    With several processes the result passes through JSON.
    """
    if count() == 1:
        return function()
    outcome = None
    if is_main():
        try:
            outcome = {'result': function()}
        except UserError as error:
            attributes = {'kind': error.kind, 'field': error.field, 'file': error.file}
            outcome = {'error': str(error), 'attributes': attributes}
    outcome = gather(outcome)[0]
    if 'error' in outcome:
        raise UserError(outcome['error'], **outcome['attributes'])
    return outcome['result']


def check_equal(subject: str, fields: dict[str, Any]) -> None:
    """Raises UserError if fields differ between processes.

    Args:
      subject: the owner of the fields, for the message, for example 'the config'.
      fields: the values of this process by name.
    """
    first, *others = gather(fields)
    lines = []
    for process, other in enumerate(others, 1):
        for name in sorted(first.keys() | other.keys()):
            expected = first.get(name, 'absent')
            value = other.get(name, 'absent')
            if value != expected:
                lines.append(f'{name}: {expected!r} on process 0, {value!r} on process {process}')
    if lines:
        raise UserError(
            f'{subject} of the processes differs. Start all with the same:\n  '
            + some(lines, SHOWN, '\n  '),
            kind='conflict',
            value=lines,
        )


def check_equal_arrays(subject: str, tree: PyTree) -> None:
    """Raises UserError if the arrays of a tree in host memory differ between processes."""
    if count() == 1:
        return
    checksums = {
        jax.tree_util.keystr(path): _checksum(x) for path, x in jax.tree.leaves_with_path(tree)
    }
    check_equal(subject, checksums)


def _checksum(x):
    return zlib.crc32(np.ascontiguousarray(x))


class SignalVote:
    """Shares the largest signal number of all processes with all of them, at the same call."""

    def __init__(self):
        mesh = Mesh(np.array(jax.devices()), 'all')
        self._by_device = NamedSharding(mesh, PartitionSpec('all'))
        self._largest = jax.jit(jax.numpy.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending = None

    def __call__(self, signum: int) -> int:
        """Starts a vote and returns the result of the previous one, so that no step waits."""
        votes = np.full(jax.local_device_count(), signum, np.int32)
        votes = jax.make_array_from_process_local_data(self._by_device, votes)
        previous = self._pending
        self._pending = self._largest(votes)
        if previous is None:
            return 0
        return int(previous)
