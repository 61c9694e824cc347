"""Memory, work and time of a training step that is compiled for devices that need not exist."""

import functools
import logging
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import feeding, sharding
from vit_jax.planning import collectives
from vit_jax.training import accumulation, chips, optimizer, resolve
from vit_jax.training.program import Program

log = logging.getLogger(__name__)

UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
TRIES = 3  # batches compiled in search of the largest
AIM = 0.97  # of the memory in that search: memory is not quite linear in the batch


class Target(NamedTuple):
    """The devices that a step is compiled for, and the teacher that it needs, if any."""

    name: str  # of the chip in chips.CHIPS
    devices: list[jax.Device]
    simulated: bool  # whether they are those of the CPU, whose compiler gives rougher numbers
    limit: float  # bytes of a device that a step may take
    teacher: Teacher | None = None

    @property
    def platform(self) -> str:
        """That of the devices: 'tpu', 'cpu' or 'gpu'."""
        if chips.CHIPS[self.name].dims:
            return 'tpu'
        return 'cpu' if self.name == 'cpu' else 'gpu'

    def program(self, config: ConfigDict, changes: Mapping[str, Any] | None = None) -> Program:
        """The program of a complete config, with `changes` by field, on these devices.

        Raises UserError when the mesh, the batch or the model does not fit the devices, or a name
        in optimizer.decay_names matches no parameter.
        """
        config = config_lib.changed(config, changes or {})
        mesh = sharding.make_mesh(config.mesh, self.devices)
        config = resolve.for_mesh(config, mesh, self.platform)
        program = Program(config, mesh, self.platform, self.teacher)
        optimizer.check_decay_names(program.abstract_state.params, config.optimizer.decay_names)
        return program


class Step(NamedTuple):
    """What a training step needs and does.

    The work of a device is `flops_per_device` of matrix products and convolutions, recomputation
    included; `sent_bytes` and `collectives` (calls) by kind of collective; `memory_traffic`, bytes
    at least read from memory and written to it.
    """

    needed: int  # bytes per device at the peak, batches under way included
    work: dict[str, Any] | None  # None if the compiler refused the step


def compile_step(program: Program, target: Target) -> Step:
    """Compiles the training step of a program; nothing is allocated on any device."""
    under_way = feeding.BATCHES_UNDER_WAY * sharding.bytes_per_device(program.abstract_batch)
    lowered = program.trace_train_step().lower()
    start = time.perf_counter()
    try:
        compiled, text = _compile(lowered, target.simulated)
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(r'([\d.]+)([KMGT])\)? (?:of|exceeds)', str(error))
        if 'RESOURCE_EXHAUSTED' not in str(error) or not refused:
            raise
        return Step(int(float(refused[1]) * UNITS[refused[2]]) + under_way, None)
    log.info(
        'compiled a step of batch %d in %d parts: %.0f s',
        program.config.batch_size,
        program.config.accum_steps,
        time.perf_counter() - start,
    )
    m = compiled.memory_analysis()
    # Arguments are read, results written, and temporary arrays both; those of the CPU are left out
    # because they differ from an accelerator's.
    traffic = m.argument_size_in_bytes + m.output_size_in_bytes
    if not target.simulated:
        traffic += 2 * m.temp_size_in_bytes
    sent, calls = collectives.count(text)
    return Step(
        accumulation.bytes_needed(compiled) + under_way,
        {
            'flops_per_device': program.flops_of_train_step() // len(target.devices),
            'sent_bytes': sent,
            'collectives': calls,
            'memory_traffic': traffic,
        },
    )


def _compile(lowered, simulated):
    """The executable, and the program of one device as HLO text.

    The CPU's compiler turns collectives of bfloat16 into float32 and has no reduce-scatter: for
    simulated devices the text is that of the program just after it was split over the devices.
    """
    if not simulated:
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(
            compiler_options={'xla_dump_to': folder, 'xla_dump_hlo_pass_re': 'spmd-partitioning'}
        )
        dumps = pathlib.Path(folder)
        split = sorted(dumps.glob('*after_spmd-partitioning*'))
        whole = sorted(dumps.glob('*before_optimizations.txt'))  # a single device
        return compiled, (split or whole)[0].read_text(encoding='utf-8')


def memory(program: Program, needed: int) -> dict[str, int]:
    """The bytes of a device at the peak (`needed`), by what they hold.

    params (and their average if there is one), optimizer (its state), gradients (as large as the
    parameters), teacher (its parameters), batches (that of the step and those under way),
    activations (all else: what the backward pass needs, and temporary memory).
    """
    state, size = program.abstract_state, sharding.bytes_per_device
    parts = {
        'params': size((state.params, state.ema_params)),
        'optimizer': size(state.opt_state),
        'gradients': size(state.params),
        'teacher': size(program.abstract_constants),
        'batches': (1 + feeding.BATCHES_UNDER_WAY) * size(program.abstract_batch),
    }
    return parts | {'activations': max(needed - sum(parts.values()), 0), 'peak': needed}


def step_seconds(target: Target, work: dict[str, Any]) -> dict[str, float] | None:
    """Seconds by the roofline for the work of a Step; None if the speed of the chip is unknown.

    arithmetic (FLOPs by the peak), memory (traffic by the bandwidth), links (bytes sent by the rate
    of all links of the device at once), least (all three at the same time: no step is faster),
    one_after_another (nothing overlaps).
    """
    chip = chips.CHIPS[target.name]
    if chip.flops is None:
        return None
    seconds = {
        'arithmetic': work['flops_per_device'] / chip.flops,
        'memory': work['memory_traffic'] / chip.bandwidth,
        'links': (sum(work['sent_bytes'].values()) / chips.send_rate(chip, len(target.devices))),
    }
    return seconds | {'least': max(seconds.values()), 'one_after_another': sum(seconds.values())}


def compile_split(program: Program, target: Target) -> tuple[Program, Step]:
    """A program and its compiled step; accum_steps 0 becomes the smallest number that fits.

    Raises UserError when not even one image per device fits.
    """
    step_of = functools.cache(lambda program: compile_step(program, target))
    if not program.config.accum_steps:
        program = accumulation.choose(
            program, limit=target.limit, size_of=lambda program: step_of(program).needed
        )
    return program, step_of(program)


def largest_batch(program: Program, target: Target, first: Step) -> tuple[int, int] | None:
    """(batch size, bytes needed) of the largest batch found to fit with a program's mesh and split.

    Memory grows about linearly with the images per device: a line through the two largest compiled
    steps, at first that of the program, proposes a size, a compiled step of that size decides, and
    may correct the line.
    """
    parts = sharding.batch_parts(program.mesh) * program.config.accum_steps
    own = program.config.batch_size // parts
    needed = {own: first.needed}  # by images per device and part of the batch

    def fits(images):
        if images not in needed:
            other = target.program(
                program.config,
                {'batch_size': images * parts, 'num_steps': program.num_steps, 'num_epochs': 0.0},
            )
            needed[images] = compile_step(other, target).needed
        return needed[images] <= target.limit

    best = max(filter(fits, (own // 2 or 2, own)), default=0)
    for _ in range(TRIES):
        (few, low), (many, high) = sorted(needed.items())[-2:]
        slope = (high - low) / (many - few)
        proposed = few + int((AIM * target.limit - low) / slope) if slope > 0 else 0
        if proposed >= 32:
            proposed -= proposed % 8  # compilers pad to a multiple of 8
        if proposed <= best or proposed in needed:
            break
        if fits(proposed):
            best = proposed
            if needed[best] > 0.9 * target.limit:
                break
    return (best * parts, needed[best]) if best else None
