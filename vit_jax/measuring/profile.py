"""A trace of a few steps, and the operations that took most of their time."""

import collections
import contextlib
import gzip
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping

import jax

# Operations whose time is the time of the operations within them.
CONTAINERS = re.compile(r'(while|conditional|call)(\.\d+)?$')


def trace(run: Callable[[int], float], steps: int, directory: str) -> None:
    """Writes a trace of some steps, for TensorBoard, XProf and Perfetto."""
    # On a CPU libtpu, which is installed for plans, prints an error about tracing.
    mute = _muted_stderr if jax.default_backend() == 'cpu' else contextlib.nullcontext
    with mute(), jax.profiler.trace(directory):
        run(steps)


@contextlib.contextmanager
def _muted_stderr():
    """A context in which the process, including its C++ libraries, writes nothing to stderr."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, 'wb') as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def places(program: str) -> dict[str, str]:
    """Returns the place in the model of each operation of a compiled program, by JAX's names.

    A fusion has the place of its last operation. Operations of several places are left out.

    Args:
      program: text of the program, from compiled.as_text().

    Returns:
      Places by operation, such as
      {'fusion.7': 'backward ViT.encode/EncoderBlock/mlp/dense1/dot_general'}.
    """
    operations_and_places = re.findall(
        r'^ *(?:ROOT )?%?([\w.-]+) = .*metadata={op_name="([^"]+)"', program, re.M
    )
    place_of = {operation: _shortened(place) for operation, place in operations_and_places}
    return {operation: place for operation, place in place_of.items() if '(' not in place}


def _shortened(place):
    """Removes JAX's names for derivatives, loops and rematerialisation from a place."""
    place = re.sub(r'transpose\(jvp\(\w+\)\)/', 'backward ', place)
    place = re.sub(r'jvp\(\w+\)/', 'forward ', place)
    place = re.sub(
        r'jit\([^()]*\)/|closed_call/|checkpoint/|while/body/|cond/branch_\d_fun/', '', place
    )
    return re.sub(r'((?:\w+/)+)\1', r'\1', place)


def operations(directory: str, steps: int, place_of: Mapping[str, str]) -> list[tuple[str, float]]:
    """Returns (place, seconds per step) of the operations in the newest trace, the longest first.

    The seconds are a sum over all threads or devices, and over all operations with the same place,
    such as in different layers.

    Args:
      directory: the directory of the traces.
      steps: number of steps in the trace.
      place_of: places by operation. An operation without a place, such as a sum over devices, has
        its own name without its number.
    """
    files = sorted(pathlib.Path(directory).rglob('*.trace.json.gz'), key=os.path.getmtime)
    if not files:
        return []
    with gzip.open(files[-1], 'rt') as file:
        events = json.load(file)['traceEvents']
    seconds: dict[str, float] = collections.defaultdict(float)
    for event in events:
        operation = event.get('args', {}).get('hlo_op')
        if not operation:
            continue
        if operation.startswith('command_buffer'):  # many kernels of a GPU
            operation = event['name']
        if CONTAINERS.match(operation):
            continue
        place = place_of.get(operation) or re.sub(r'\.\d+$', '', operation)
        seconds[place] += event['dur'] / 1e6 / steps
    return sorted(seconds.items(), key=lambda item: item[1], reverse=True)
