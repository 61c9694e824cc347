"""Chooses into how many parts a batch is split: as fits in memory and, on a CPU, in caches."""

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

HEADROOM = 0.9  # of the memory; the rest is for fragmentation and the next batches
LARGE = 1 / 4  # of the memory: a step of more keeps no memory for the next one
PROBES = (8, 16)  # images per device of the two steps that are compiled to learn the slope


@contextlib.contextmanager
def advice_on_memory() -> Iterator[None]:
    """Adds what a run can do about too little memory to the error of JAX that says so."""
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
    """The program that splits its batch into the fewest parts with which a training step fits.

    They are at least as many as are computed fastest, more than one on a CPU only. Memory grows
    linearly with the images per device: two small steps are compiled, the line through them
    proposes a size, and the compiler's own figure for that size decides. Several processes decide
    by the one with the least memory. How `program` itself splits the batch does not matter.

    Args:
      reserved: bytes of a device that batches take besides the one of the step.
      limit: bytes of a device that may be used; default HEADROOM of its memory.
      size_of: bytes per device that the training step of a program needs.

    Raises UserError when not even one image per device fits.
    """
    images = program.config.batch_size // sharding.batch_parts(program.mesh)  # per device and step
    programs = {
        images // n: program.with_accum_steps(n)  # by images at a time
        for n in range(program.fastest_parts, images + 1)
        if images % n == 0
    }
    needed = functools.cache(lambda at_once: size_of(programs[at_once]))
    begin = time.perf_counter()
    log.info('compiling small training steps, to choose accum_steps by the memory that they need')
    few, many = (min(programs, key=lambda n: abs(n - probe)) for probe in PROBES)
    slope = (needed(many) - needed(few)) / (many - few) if many > few else 0.0
    if limit is None:  # after compiling, for which the process has taken memory
        limit = HEADROOM * min(consensus.gather(memory_limit()))
    limit -= reserved
    for at_once, chosen in programs.items():
        estimated = needed(few) + slope * (at_once - few)
        if (estimated <= limit or not slope or at_once == 1) and needed(at_once) <= limit:
            log.info(
                'accum_steps is %d: %d images at a time need %.2g of %.3g GB of a device '
                '(compiled in %.1f s)',
                images // at_once,
                at_once,
                needed(at_once) / 1e9,
                limit / 1e9,
                time.perf_counter() - begin,
            )
            return chosen
    raise UserError(
        f'a step with one image per device needs {needed(1) / 1e9:.1f} GB and '
        f'{limit / 1e9:.1f} GB may be used. Choose a smaller model or more memory.'
    )


def check_fits(needed: float, what: str) -> None:
    """Raises UserError when `what` needs more bytes of a device than there are.

    A machine without that memory would kill the program, or JAX abort it, without a word.
    """
    limit = min(consensus.gather(memory_limit()))
    if needed > limit:
        raise UserError(
            f'{what} needs {needed / 1e9:,.3g} GB of a device, and {limit / 1e9:,.3g} '
            'GB are available: lower batch_size or image_size, take a smaller model, '
            'or split the batch by --config.accum_steps=0 (into parts that fit) or N.'
        )


def make_room(needed: float) -> None:
    """Gives memory back that large training steps, of `needed` bytes, would find in use.

    malloc keeps the memory of a step in pieces, into which the next step may not fit, so that a
    process takes several times the memory of a step. Large steps therefore keep nothing.

    Raises UserError, as `check_fits`, if there is not so much memory.
    """
    check_fits(needed, 'a training step')
    if needed > LARGE * memory_limit():
        machine.give_memory_back()


def bytes_needed(compiled: jax.stages.Compiled) -> int:
    """Bytes per device by the compiler: arguments, results not written over them, temporaries."""
    m = compiled.memory_analysis()
    assert m is not None  # CPU, GPU and TPU have one
    return max(
        consensus.gather(
            m.argument_size_in_bytes
            + m.output_size_in_bytes
            - m.alias_size_in_bytes
            + m.temp_size_in_bytes
        )
    )


def memory_limit() -> float:
    """Bytes that one local device may use; on CPU, its share of the machine's free memory."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and 'bytes_limit' in stats:
        return stats['bytes_limit']
    return machine.available_memory() / jax.local_device_count()
