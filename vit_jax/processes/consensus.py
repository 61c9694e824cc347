"""Decisions that could differ between processes are made once, for all of them.

All processes must call these functions in the same order, and each waits for the others. With one
process nothing is sent, and JAX's devices are not touched.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError

SHOWN = 20  # differences that one message lists


def count() -> int:
    """Number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_main() -> bool:
    """Whether this is process 0, which alone writes logs, metrics and the config."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def agree(value: Any, decide: Callable[[list], Any]) -> Any:
    """One decision for all: `decide([value of process 0, of process 1, ...])`.

    Args:
      value: must be possible in JSON.
      decide: must depend on these values alone; it is called, and may raise, on every process.
    """
    return decide([value] if count() == 1 else _gather(value))


def from_main(function: Callable[[], Any]) -> Any:
    """The result of `function` on process 0, as from JSON, or its UserError, on all processes."""
    if count() == 1:
        return function()
    outcome = None
    if is_main():
        try:
            outcome = {'result': function()}
        except UserError as error:
            outcome = {'error': str(error)}
    outcome = agree(outcome, lambda outcomes: outcomes[0])
    if 'error' in outcome:
        raise UserError(outcome['error'])
    return outcome['result']


def check_equal(what: str, fields: dict[str, Any]) -> None:
    """Raises UserError if the fields of `what`, say 'the config', differ between processes."""
    def compare(all_fields):
        first = all_fields[0]
        lines = [f'{name}: {first.get(name, "absent")!r} on process 0, '
                 f'{fields.get(name, "absent")!r} on process {process}'
                 for process, fields in enumerate(all_fields)
                 for name in sorted(first.keys() | fields.keys())
                 if fields.get(name, 'absent') != first.get(name, 'absent')]
        if lines:
            more = f'\n  and {len(lines) - SHOWN} more' if len(lines) > SHOWN else ''
            raise UserError(f'{what} of the processes differs. Start all with the same:\n  '
                            + '\n  '.join(lines[:SHOWN]) + more)

    agree(fields, compare)


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


def _gather(value):
    """The values of all processes, sent as JSON over the devices."""
    text = np.frombuffer(json.dumps([jax.process_index(), value]).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    # The same length on all processes, and one of few, because each is compiled.
    padded = np.zeros(2 ** int(sizes.max() - 1).bit_length(), np.uint8)
    padded[:text.size] = text
    texts = multihost_utils.process_allgather(padded)
    values = dict(json.loads(text[:size].tobytes())
                  for text, size in zip(texts, sizes, strict=True))
    return [values[process] for process in sorted(values)]
