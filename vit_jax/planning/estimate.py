"""Memory, work and time of a training step, compiled for devices that need not exist."""

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
from vit_jax.objectives import registry
from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import feeding, sharding
from vit_jax.planning import collectives
from vit_jax.training import accumulation, chips, optimizer, resolve
from vit_jax.training.program import Program

log = logging.getLogger(__name__)

UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
TRIES = 3  # number of batch sizes that the search for the largest batch compiles
AIM = 0.97  # share of the memory that the search aims at, because memory is not quite linear


class Target(NamedTuple):
    """The devices to compile a step for, and the teacher of the step, if any."""

    name: str  # name of the chip, a key of chips.CHIPS
    devices: list[jax.Device]
    simulated: bool  # whether CPU devices simulate the chips, with rougher numbers
    limit: float  # bytes that a step may use on a device
    teacher: Teacher | None = None

    @property
    def platform(self) -> str:
        """The platform of the chip: 'tpu', 'cpu' or 'gpu'."""
        if chips.CHIPS[self.name].dims:
            return 'tpu'
        return 'cpu' if self.name == 'cpu' else 'gpu'

    def program(self, config: ConfigDict, changes: Mapping[str, Any] | None = None) -> Program:
        """Returns the program of a config on these devices.

        Args:
          config: a complete config.
          changes: values that differ, by field.

        Raises:
          UserError: the mesh, the batch or the model does not fit the devices, or a name in
            optimizer.decay_names matches no parameter.
        """
        config = config_lib.changed(config, changes or {})
        mesh = sharding.make_mesh(config.mesh, self.devices)
        config = resolve.for_mesh(config, mesh, self.platform, self.teacher)
        objective = registry.of_config(config, self.teacher)
        program = Program(config, mesh, self.platform, objective)
        optimizer.check_decay_names(program.abstract_state.params, config.optimizer.decay_names)
        return program


class Step(NamedTuple):
    """Memory and work of a training step on one device.

    The work is a dict with `flops_per_device` of matrix products and convolutions, including
    recomputation; `sent_bytes` and `collectives` (number of calls), by kind of collective; and
    `memory_traffic`, a lower bound of the bytes read from and written to memory.
    """

    needed: int  # bytes at the peak, including the batches that are prefetched
    work: dict[str, Any] | None  # None if the compiler rejected the step


def compile_step(program: Program, target: Target) -> Step:
    """Compiles the training step of a program without allocating memory on a device."""
    prefetched = feeding.BATCHES_UNDER_WAY * sharding.bytes_per_device(program.abstract_batch)
    lowered = program.trace_train_step().lower()
    start = time.perf_counter()
    try:
        compiled, text = _compile(lowered, target.simulated)
    except jax.errors.JaxRuntimeError as error:
        needed = _bytes_of_rejected_step(error)
        if needed is None:
            raise
        return Step(needed + prefetched, None)
    log.info(
        'Compiled a step with batch size %d in %d parts in %.0f s',
        program.config.batch_size,
        program.config.accum_steps,
        time.perf_counter() - start,
    )
    sent, calls = collectives.count(text)
    work = {
        'flops_per_device': program.flops_of_train_step() // len(target.devices),
        'sent_bytes': sent,
        'collectives': calls,
        'memory_traffic': _memory_traffic(compiled, target.simulated),
    }
    return Step(accumulation.bytes_needed(compiled) + prefetched, work)


def _bytes_of_rejected_step(error):
    """The memory that a compiler's out-of-memory error states; None for other errors."""
    text = str(error)
    size = re.search(r'([\d.]+)([KMGT])\)? (?:of|exceeds)', text)
    if 'RESOURCE_EXHAUSTED' not in text or size is None:
        return None
    return int(float(size[1]) * UNITS[size[2]])


def _memory_traffic(compiled, simulated):
    """A lower bound of the bytes that a step reads and writes."""
    analysis = compiled.memory_analysis()
    traffic = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    if not simulated:  # the temporary arrays of a CPU differ from an accelerator's
        traffic += 2 * analysis.temp_size_in_bytes  # written and read
    return traffic


def _compile(lowered, simulated):
    """The executable, and the program of one device as HLO text.

    The CPU's compiler converts bfloat16 collectives to float32 and has no reduce-scatter. For
    simulated devices the text is therefore the program directly after its partitioning over the
    devices.
    """
    if not simulated:
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(
            compiler_options={'xla_dump_to': folder, 'xla_dump_hlo_pass_re': 'spmd-partitioning'}
        )
        dumps = pathlib.Path(folder)
        texts = sorted(dumps.glob('*after_spmd-partitioning*'))
        if not texts:  # for a single device there is no partitioning
            texts = sorted(dumps.glob('*before_optimizations.txt'))
        return compiled, texts[0].read_text(encoding='utf-8')


def memory(program: Program, needed: int) -> dict[str, int]:
    """Splits the peak memory of a device, in bytes.

    Args:
      program: the program of the step.
      needed: the peak.

    Returns:
      `params` (including their average, if there is one), `optimizer` (state), `gradients`,
      `teacher` (parameters), `batches` (the batch of the step, and prefetched batches),
      `activations` (everything else: values for the backward pass, and temporary memory) and
      `peak`.
    """
    state = program.abstract_state
    size = sharding.bytes_per_device
    parts = {
        'params': size((state.params, state.ema_params)),
        'optimizer': size(state.opt_state),
        'gradients': size(state.params),
        'teacher': size(program.abstract_constants),
        'batches': (1 + feeding.BATCHES_UNDER_WAY) * size(program.abstract_batch),
    }
    return parts | {'activations': max(needed - sum(parts.values()), 0), 'peak': needed}


def step_seconds(target: Target, work: dict[str, Any]) -> dict[str, float] | None:
    """Returns the seconds of a step by the roofline; None if the speed of the chip is unknown.

    Args:
      target: the devices.
      work: the work of a Step.

    Returns:
      `arithmetic` (FLOPs / peak FLOP/s), `memory` (traffic / bandwidth), `links` (sent bytes / rate
      of all links of the device together), `least` (the lower bound: all three overlap) and
      `one_after_another` (nothing overlaps).
    """
    chip = chips.CHIPS[target.name]
    if chip.flops is None:
        return None
    send_rate = chips.send_rate(chip, len(target.devices))
    seconds = {
        'arithmetic': work['flops_per_device'] / chip.flops,
        'memory': work['memory_traffic'] / chip.bandwidth,
        'links': sum(work['sent_bytes'].values()) / send_rate,
    }
    return seconds | {'least': max(seconds.values()), 'one_after_another': sum(seconds.values())}


def compile_split(program: Program, target: Target) -> tuple[Program, Step]:
    """Compiles a program; accum_steps 0 becomes the smallest number of parts that fits.

    Returns:
      The program with this number, and its step.

    Raises:
      UserError: not even one image per device fits.
    """
    step_of = functools.cache(lambda program: compile_step(program, target))
    if not program.config.accum_steps:
        program = accumulation.choose(
            program, limit=target.limit, size_of=lambda program: step_of(program).needed
        )
    return program, step_of(program)


def largest_batch(program: Program, target: Target, first: Step) -> tuple[int, int] | None:
    """Searches for the largest batch size that fits, with the mesh and the parts of a program.

    Memory grows about linearly with the images per device. A line through the two largest compiled
    steps proposes a size. Compiling the step of this size shows whether it fits, and corrects the
    line.

    Args:
      program: the program.
      target: the devices.
      first: the step of the program.

    Returns:
      (batch size, bytes needed), or None if no size fits.
    """
    # Sizes are counted in images per device and part of the batch.
    num_parts = sharding.batch_parts(program.mesh) * program.config.accum_steps
    current = program.config.batch_size // num_parts
    needed = {current: first.needed}

    def fits(images):
        if images not in needed:
            changes = {
                'batch_size': images * num_parts,
                'num_steps': program.num_steps,
                'num_epochs': 0.0,
            }
            needed[images] = compile_step(target.program(program.config, changes), target).needed
        return needed[images] <= target.limit

    second = current // 2 if current > 1 else 2
    best = 0
    for images in (second, current):
        if fits(images):
            best = max(best, images)
    for _ in range(TRIES):
        proposed = _proposed_size(needed, target.limit)
        if proposed <= best or proposed in needed:
            break
        if fits(proposed):
            best = proposed
            if needed[best] > 0.9 * target.limit:
                break
    if not best:
        return None
    return best * num_parts, needed[best]


def _proposed_size(needed, limit):
    """The size at AIM of the limit, on the line through the two largest compiled sizes."""
    (small, small_bytes), (large, large_bytes) = sorted(needed.items())[-2:]
    slope = (large_bytes - small_bytes) / (large - small)
    if slope <= 0:
        return 0
    proposed = small + int((AIM * limit - small_bytes) / slope)
    if proposed >= 32:
        proposed -= proposed % 8  # compilers pad to a multiple of 8
    return proposed
