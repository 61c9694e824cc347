"""A trace of a few steps, and which operations took most of their time."""

import collections
import contextlib
import gzip
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping

import jax

# Operations that last as long as those within them.
CONTAINERS = re.compile(r'(while|conditional|call)(\.\d+)?$')


def trace(run: Callable[[int], float], steps: int, directory: str) -> None:
    """Writes a trace of some steps that TensorBoard, XProf and Perfetto open."""
    # On a CPU libtpu, which is there to plan with, complains on stderr that it cannot trace it.
    mute = _mute if jax.default_backend() == 'cpu' else contextlib.nullcontext
    with mute(), jax.profiler.trace(directory):
        run(steps)


@contextlib.contextmanager
def _mute():
    """Within, nothing that the process writes on stderr is seen, not of C++ either."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, 'wb') as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def places(program: str) -> dict[str, str]:
    """Where in the model the operations of a compiled program stand, by JAX's names.

    {'fusion.7': 'backward ViT.encode/EncoderBlock/mlp/dense1/dot_general'}; what is computed
    together stands where the last of it does. Without those that belong to several places.

    Args:
      program: text of the program, as compiled.as_text() gives it.
    """
    found = re.findall(r'^ *(?:ROOT )?%?([\w.-]+) = .*metadata={op_name="([^"]+)"', program, re.M)
    named = {operation: _shortened(place) for operation, place in found}
    return {operation: place for operation, place in named.items() if '(' not in place}


def _shortened(place):
    """Without what differentiates the model, repeats its layers or computes them again."""
    place = re.sub(r'transpose\(jvp\(\w+\)\)/', 'backward ', place)
    place = re.sub(r'jvp\(\w+\)/', 'forward ', place)
    place = re.sub(
        r'jit\([^()]*\)/|closed_call/|checkpoint/|while/body/|cond/branch_\d_fun/', '', place
    )
    return re.sub(r'((?:\w+/)+)\1', r'\1', place)


def operations(directory: str, steps: int, place_of: Mapping[str, str]) -> list[tuple[str, float]]:
    """(place, seconds of a step) of the operations in the newest trace, the longest first.

    Those of all threads or devices are added up, and those with the same place, as in all layers.
    An operation without a place, as a sum over devices, has its own name, without its number.
    """
    files = sorted(pathlib.Path(directory).rglob('*.trace.json.gz'), key=os.path.getmtime)
    if not files:
        return []
    with gzip.open(files[-1], 'rt') as file:
        events = json.load(file)['traceEvents']
    seconds: dict[str, float] = collections.defaultdict(float)
    for event in events:
        operation = event.get('args', {}).get('hlo_op')
        if operation and operation.startswith('command_buffer'):  # of a GPU: many kernels at once
            operation = event['name']
        if operation and not CONTAINERS.match(operation):
            place = place_of.get(operation) or re.sub(r'\.\d+$', '', operation)
            seconds[place] += event['dur'] / 1e6 / steps
    return sorted(seconds.items(), key=lambda item: item[1], reverse=True)
