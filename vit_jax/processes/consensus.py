"""Decisions that could differ between processes are made once, for all of them.

All processes must call these functions in the same order, and each waits for the others. With one
process nothing is sent, and JAX's devices are not touched.
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

SHOWN = 20  # differences that one message lists


def count() -> int:
    """Number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_main() -> bool:
    """Whether this is process 0, which alone writes logs, metrics and the config."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gather(value: Any) -> list:
    """[value of process 0, of process 1, ...] on every process, to decide by these values alone.

    They are sent as JSON over the devices.
    """
    if count() == 1:
        return [value]
    text = np.frombuffer(json.dumps([jax.process_index(), value]).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    # The same length on all processes, and one of few, because each is compiled.
    padded = np.zeros(2 ** int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: text.size] = text
    texts = multihost_utils.process_allgather(padded)
    values = dict(
        json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)
    )
    return [values[process] for process in sorted(values)]


def from_main(function: Callable[[], Any]) -> Any:
    """The result of `function` on process 0, as from JSON, or its UserError, on all processes."""
    if count() == 1:
        return function()
    outcome = None
    if is_main():
        try:
            outcome = {'result': function()}
        except UserError as error:
            about = {'kind': error.kind, 'field': error.field, 'file': error.file}
            outcome = {'error': str(error), 'about': about}
    outcome = gather(outcome)[0]
    if 'error' in outcome:
        raise UserError(outcome['error'], **outcome['about'])
    return outcome['result']


def check_equal(what: str, fields: dict[str, Any]) -> None:
    """Raises UserError if the fields of `what`, say 'the config', differ between processes."""
    first, *others = gather(fields)
    lines = [
        f'{name}: {first.get(name, "absent")!r} on process 0, '
        f'{other.get(name, "absent")!r} on process {process}'
        for process, other in enumerate(others, 1)
        for name in sorted(first.keys() | other.keys())
        if other.get(name, 'absent') != first.get(name, 'absent')
    ]
    if lines:
        raise UserError(
            f'{what} of the processes differs. Start all with the same:\n  '
            + some(lines, SHOWN, '\n  ')
        )


def check_equal_arrays(what: str, tree: PyTree) -> None:
    """Raises UserError if the arrays of a tree, which are on the hosts, differ between them."""
    if count() > 1:
        check_equal(
            what,
            {
                jax.tree_util.keystr(path): _checksum(x)
                for path, x in jax.tree.leaves_with_path(tree)
            },
        )


def _checksum(x):
    return zlib.crc32(np.ascontiguousarray(x))


class SignalVote:
    """Tells all processes, at the same call, the largest signal number that any of them gave."""

    def __init__(self):
        mesh = Mesh(np.array(jax.devices()), 'all')
        self._by_device = NamedSharding(mesh, PartitionSpec('all'))
        self._largest = jax.jit(jax.numpy.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._under_way = None

    def __call__(self, signum: int) -> int:
        """The largest number of the previous call: reading that of this one would wait for it."""
        votes = np.full(jax.local_device_count(), signum, np.int32)
        votes = jax.make_array_from_process_local_data(self._by_device, votes)
        before, self._under_way = self._under_way, self._largest(votes)
        return 0 if before is None else int(before)
