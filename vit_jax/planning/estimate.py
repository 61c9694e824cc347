"""Memory, work and time of a training step that is compiled for devices that need not be there."""

import logging
import math
import os
import re
import tempfile
import time
from typing import NamedTuple

import jax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.planning import hlo
from vit_jax.training import accumulation, chips, sharding
from vit_jax.training.program import Program

log = logging.getLogger(__name__)

UNDER_WAY = 2  # batches on the devices beside the one of the step, as in training
UNITS = {'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}
TRIES = 3  # batches compiled in search of the largest
AIM = 0.97  # of the memory in that search: layouts bend the line


class Target(NamedTuple):
    """What is compiled for.

    Attributes:
      name: of the chip in chips.CHIPS.
      devices: of a TPU slice, or simulated.
      simulated: whether the compiler is that of the CPU, whose program has to be corrected.
      limit: bytes of a device that a step may take.
    """

    name: str
    devices: list[jax.Device]
    simulated: bool
    limit: float

    @property
    def chip(self) -> chips.Chip:
        """The chip's numbers."""
        return chips.CHIPS[self.name]


class Memory(NamedTuple):
    """Bytes per device.

    Attributes:
      params: parameters, and their average where there is one.
      optimizer: state of the optimizer.
      gradients: as large as the parameters, in their dtype.
      batches: images of the step and of those under way.
      activations: all else at the peak: what the backward pass needs, and room to work in.
      peak: by the compiler, and the batches under way.
    """

    params: int
    optimizer: int
    gradients: int
    batches: int
    activations: int
    peak: int


class Step(NamedTuple):
    """A compiled training step, or one that the compiler refused.

    Attributes:
      needed: bytes per device at the peak, with batches under way; of a refused step what the
        compiler says it needs.
      counts: what a device does; None when refused.
      traffic: bytes that it at least reads from memory and writes to it.
    """

    needed: int
    counts: hlo.Counts | None
    traffic: int


class Time(NamedTuple):
    """Seconds of a step by the roofline: none of the three can be faster than the chip is.

    Attributes:
      arithmetic: FLOPs by the peak.
      memory: traffic by the bandwidth of the memory.
      links: bytes sent by the rate of all links of the device at once.
    """

    arithmetic: float
    memory: float
    links: float

    @property
    def least(self) -> float:
        """All three at the same time: no step is faster."""
        return max(self)

    @property
    def one_after_another(self) -> float:
        """Nothing overlaps."""
        return sum(self)


def compile_step(config: ConfigDict, target: Target) -> Step:
    """Compiles the step of a settled config; allocates nothing on any device."""
    program = Program(config, sharding.make_mesh(config.mesh, target.devices))
    lowered = program.lower_train_step(config.accum_steps)
    under_way = UNDER_WAY * share(program.abstract_batch)
    start = time.perf_counter()
    try:
        compiled, text = _compile(lowered, target.simulated)
        log.info('compiled a step of batch %d in %d parts: %.0f s', config.batch_size,
                 config.accum_steps, time.perf_counter() - start)
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(r'([\d.]+)([KMGT])\)? (?:of|exceeds)', str(error))
        if 'RESOURCE_EXHAUSTED' not in str(error) or not refused:
            raise
        needed = float(refused.group(1)) * UNITS[refused.group(2)]
        return Step(int(needed) + under_way, None, 0)
    m = compiled.memory_analysis()
    # Every argument is read, every result written, and what is kept in between both; the CPU keeps
    # other things than an accelerator would.
    traffic = m.argument_size_in_bytes + m.output_size_in_bytes
    if not target.simulated:
        traffic += 2 * m.temp_size_in_bytes
    return Step(accumulation.bytes_needed(compiled) + under_way, hlo.Module(text).count(), traffic)


def _compile(lowered, simulated):
    """The executable, and the program that a device runs as HLO text.

    The CPU's compiler turns collectives of bfloat16 into float32 and knows no reduce-scatter: of a
    simulated device the program is taken as it is when it has just been split over the devices.
    """
    if not simulated:
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={
            'xla_dump_to': folder, 'xla_dump_hlo_pass_re': 'spmd-partitioning'})
        names = sorted(os.listdir(folder))
        split = [name for name in names if 'after_spmd-partitioning' in name]
        whole = [name for name in names if name.endswith('before_optimizations.txt')]
        with open(os.path.join(folder, (split or whole)[0]), encoding='utf-8') as file:
            return compiled, file.read()


def memory(config: ConfigDict, target: Target, needed: int) -> Memory:
    """What the bytes of a compiled step are.

    Args:
      needed: of the Step.
    """
    program = Program(config, sharding.make_mesh(config.mesh, target.devices))
    state = program.abstract_state
    gradients = share(state.params)
    params = gradients + share(state.ema_params)
    optimizer = share(state.opt_state)
    batches = (1 + UNDER_WAY) * share(program.abstract_batch)
    return Memory(params, optimizer, gradients, batches,
                  max(needed - params - optimizer - gradients - batches, 0), needed)


def share(tree: PyTree) -> int:
    """Bytes of the arrays of a tree on one device, by their shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
               for x in jax.tree.leaves(tree))


def step_time(target: Target, step: Step) -> Time | None:
    """The roofline of a compiled step; None for a chip whose speed is not known."""
    chip = target.chip
    if chip.flops is None:
        return None
    return Time(step.counts.flops / chip.flops, step.traffic / chip.bandwidth,
                sum(step.counts.sent.values()) / chips.send_rate(chip, len(target.devices)))


def with_batch(config: ConfigDict, images: int, parts: int) -> ConfigDict:
    """The config with so many images per device and part of the batch; as many steps as before."""
    steps = config_lib.total_steps(config)
    config = config.copy_and_resolve_references()
    config.update(batch_size=images * parts * config.accum_steps, num_steps=steps, num_epochs=0.0)
    return config


def choose_parts(config: ConfigDict, target: Target) -> ConfigDict:
    """The config, in which accum_steps 0 has become the fewest parts that fit.

    Raises:
      UserError: not even one image per device fits.
    """
    if config.accum_steps:
        return config

    def with_parts(accum_steps):
        changed = config.copy_and_resolve_references()
        changed.accum_steps = accum_steps
        return changed

    parts = sharding.batch_parts(sharding.make_mesh(config.mesh, target.devices))
    accum_steps, _ = accumulation.choose(
        lambda n: compile_step(with_parts(n), target), config.batch_size, parts,
        limit=target.limit, size_of=lambda step: step.needed)
    return with_parts(accum_steps)


def largest_batch(config: ConfigDict, target: Target, first: Step) -> tuple[int, int] | None:
    """The largest batch that fits, with the mesh and the accumulation of the config.

    Memory grows about linearly with the images per device: a line through the two largest compiled
    steps proposes a size, a compiled step of that size decides, and may correct the line.

    Args:
      first: the compiled step of the config's own batch.

    Returns:
      (batch size, bytes needed), None when nothing was found to fit.
    """
    parts = sharding.batch_parts(sharding.make_mesh(config.mesh, target.devices))
    needed = {config.batch_size // parts // config.accum_steps: first.needed}

    def fits(images):
        if images not in needed:
            needed[images] = compile_step(with_batch(config, images, parts), target).needed
        return needed[images] <= target.limit

    (images,) = needed
    best = max(filter(fits, (images // 2 or 2, images)), default=0)
    for _ in range(TRIES):
        (few, low), (many, high) = sorted(needed.items())[-2:]
        slope = (high - low) / (many - few)
        proposed = _round(few + int((AIM * target.limit - low) / slope)) if slope > 0 else 0
        if proposed <= best or proposed in needed:
            break
        if fits(proposed):
            best = proposed
            if needed[best] > 0.9 * target.limit:
                break
    return (best * parts * config.accum_steps, needed[best]) if best else None


def _round(images):
    """Down to a multiple of 8 where that is little: compilers pad to it."""
    return images // 8 * 8 if images >= 32 else images
