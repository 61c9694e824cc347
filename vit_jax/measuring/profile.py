"""A trace of a few steps, and which operations took most of their time."""

import collections
import gzip
import json
import os
import pathlib
from collections.abc import Callable

import jax

from vit_jax.errors import UserError


def make(directory: str) -> None:
    """Makes the directory for a trace; UserError where there can be none."""
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise UserError(f'--profile={directory} cannot be made ({error.strerror}): name a '
                        'directory that can be written.') from error


def trace(run: Callable[[int], float], steps: int, directory: str) -> None:
    """Writes a trace of some steps that TensorBoard, XProf and Perfetto open."""
    with jax.profiler.trace(directory):
        run(steps)


def operations(directory: str, steps: int) -> list[tuple[str, float]]:
    """(name, seconds of a step) of the operations in the newest trace, the longest first.

    Those of all threads or devices are added up.
    """
    files = sorted(pathlib.Path(directory).rglob('*.trace.json.gz'), key=os.path.getmtime)
    if not files:
        return []
    with gzip.open(files[-1], 'rt') as file:
        events = json.load(file)['traceEvents']
    seconds = collections.Counter()
    for event in events:
        operation = event.get('args', {}).get('hlo_op')
        if operation and operation.startswith('command_buffer'):  # of a GPU: many kernels at once
            operation = event['name']
        if operation:
            seconds[operation] += event['dur'] / 1e6 / steps
    return seconds.most_common()
