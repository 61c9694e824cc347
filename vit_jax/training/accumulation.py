"""Chooses the number of parts of a batch, by memory and, on a CPU, by the size of the caches."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator

import jax

from vit_jax import machine
from vit_jax.errors import UserError, is_out_of_memory
from vit_jax.parallel import sharding
from vit_jax.processes import consensus
from vit_jax.training.program import Program

log = logging.getLogger(__name__)

HEADROOM = 0.9  # usable share of the memory; the rest is for fragmentation and the next batches
LARGE = 1 / 4  # a step that needs a larger share of the memory keeps none for the next step
PROBES = (8, 16)  # images per device of the two steps that measure how memory grows


@contextlib.contextmanager
def advice_on_memory() -> Iterator[None]:
    """Adds advice to out-of-memory errors of JAX that leave this context."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            error.add_note(
                'In training --config.accum_steps=0 splits the batch into parts that fit, and on '
                'a GPU --config.model.remat_policy=products keeps less.'
            )
        raise


def choose(
    program: Program,
    reserved: float = 0.0,
    limit: float | None = None,
    size_of: Callable[[Program], int] = lambda program: bytes_needed(program.train_step),
) -> Program:
    """The program whose training step fits in memory with the fewest parts of a batch.

    The number of parts is at least `program.fastest_parts`, which exceeds 1 on a CPU only. Memory
    grows linearly with the images per device: a line through two small compiled steps proposes a
    size, and the compiler's own figure for this size decides. Several processes use the smallest
    memory among them.

    Args:
      program: the program; its current number of parts does not matter.
      reserved: bytes of a device that are needed besides the step.
      limit: bytes of a device that may be used; by default HEADROOM of its memory.
      size_of: returns the bytes per device that the training step of a program needs.

    Raises:
      UserError: if a step with one image per device does not fit.
    """
    images = program.config.batch_size // sharding.batch_parts(program.mesh)  # per device and step
    programs = {
        images // parts: program.with_accum_steps(parts)  # keys: images per device in a part
        for parts in range(program.fastest_parts, images + 1)
        if images % parts == 0
    }
    needed = functools.cache(lambda part_size: size_of(programs[part_size]))
    begin = time.perf_counter()
    log.info('compiling small training steps to choose accum_steps by their memory')
    small = min(programs, key=lambda part_size: abs(part_size - PROBES[0]))
    large = min(programs, key=lambda part_size: abs(part_size - PROBES[1]))
    bytes_per_image = 0.0
    if large > small:
        bytes_per_image = (needed(large) - needed(small)) / (large - small)
    if limit is None:  # read after compiling, which takes memory of the process
        limit = HEADROOM * min(consensus.gather(memory_limit()))
    limit -= reserved
    for part_size, candidate in programs.items():
        estimated = needed(small) + bytes_per_image * (part_size - small)
        is_likely = estimated <= limit or not bytes_per_image or part_size == 1
        if is_likely and needed(part_size) <= limit:
            log.info(
                'accum_steps is %d: parts of %d images need %.2g of %.3g GB of a device '
                '(compiled in %.1f s)',
                images // part_size,
                part_size,
                needed(part_size) / 1e9,
                limit / 1e9,
                time.perf_counter() - begin,
            )
            return candidate
    raise UserError(
        f'a training step with one image per device needs {needed(1) / 1e9:.1f} GB: expected at '
        f'most {limit / 1e9:.1f} GB. Use a smaller model or more memory.',
        kind='resource',
    )


def check_fits(needed: float, name: str) -> None:
    """Raises UserError if arrays or a program need more memory than a device has.

    Without this check the system would kill the process, or JAX abort it, without a message.

    Args:
      needed: bytes that are needed on a device.
      name: the name of the arrays or the program, for the message.
    """
    limit = min(consensus.gather(memory_limit()))
    if needed > limit:
        raise UserError(
            f'{name} needs {needed / 1e9:,.3g} GB of a device, and {limit / 1e9:,.3g} '
            'GB are available: lower batch_size or image_size, use a smaller model, '
            'or split the batch by --config.accum_steps=0 (into parts that fit) or N.',
            kind='resource',
        )


def make_room(needed: float) -> None:
    """Makes malloc return freed memory to the system if a step needs much of the memory.

    malloc keeps the memory of a step in pieces, and the arrays of the next step may not fit into
    them. The process would then use several times the memory of a step.

    Raises:
      UserError: if the step needs more memory than there is.
    """
    check_fits(needed, 'a training step')
    if needed > LARGE * memory_limit():
        machine.give_memory_back()


def bytes_needed(compiled: jax.stages.Compiled) -> int:
    """Bytes per device according to the compiler: arguments, new results and temporary arrays."""
    analysis = compiled.memory_analysis()
    assert analysis is not None  # CPU, GPU and TPU have one
    size = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    return max(consensus.gather(size))


def memory_limit() -> float:
    """Bytes that one local device may use; a CPU device has its share of the free memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and 'bytes_limit' in stats:
        return stats['bytes_limit']
    return machine.available_memory() / jax.local_device_count()
