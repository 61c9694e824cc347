"""Chooses into how many parts a batch is cut so that a training step fits in device memory."""

import logging
from collections.abc import Callable

import jax

from vit_jax.errors import UserError
from vit_jax.processes import hosts

log = logging.getLogger(__name__)

HEADROOM = 0.9  # of the memory; the rest is for fragmentation and the next batches
PROBES = (8, 16)  # images per device of the two steps that are compiled to learn the slope


def choose(compile_step: Callable, batch_size: int, devices: int, reserved: float = 0.0,
           limit: float | None = None, size_of: Callable | None = None):
    """The fewest accumulation steps with which a step fits, and the compiled step.

    Memory grows linearly with the images per device: two small steps are compiled, the line through
    them proposes a size, and the compiler's own figure for that size decides. Several processes
    decide by the one with the least memory.

    Args:
      compile_step: accum_steps -> jax.stages.Compiled.
      batch_size: of a whole step.
      devices: that the batch is spread over.
      reserved: bytes of a device that other batches under way take.
      limit: bytes that a step may take; default HEADROOM of the devices of this process.
      size_of: bytes per device of a compiled step; default bytes_needed.

    Raises:
      UserError: not even one image per device fits.
    """
    size_of = size_of or bytes_needed
    if limit is None:
        limit = HEADROOM * hosts.agree(memory_limit(), min)
    limit -= reserved
    images = batch_size // devices  # per device and step
    parts = [n for n in range(1, images + 1) if images % n == 0]
    slope, offset = _line(lambda n: size_of(compile_step(n)), images, parts)
    for accum_steps in parts:
        if offset + slope * images / accum_steps > limit and accum_steps != parts[-1]:
            continue
        compiled = compile_step(accum_steps)
        needed = size_of(compiled)
        if needed <= limit:
            log.info('accumulating gradients over %d steps of %d images per device: %.1f of '
                     '%.1f GB', accum_steps, images // accum_steps, needed / 1e9, limit / 1e9)
            return accum_steps, compiled
    raise UserError(f'a step with one image per device needs {needed / 1e9:.1f} GB and '
                    f'{limit / 1e9:.1f} GB may be used. Choose a smaller model or more memory.')


def bytes_needed(compiled) -> int:
    """Bytes per device by the compiler: arguments, results not written over them, and work."""
    m = compiled.memory_analysis()
    return hosts.agree(m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
                       + m.temp_size_in_bytes, max)


def memory_limit() -> float:
    """Bytes that one local device may use; on CPU its share of what the machine has free."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and 'bytes_limit' in stats:
        return stats['bytes_limit']
    import psutil  # a plan for other machines does without

    return psutil.virtual_memory().available / jax.local_device_count()


def _line(bytes_of, images, parts):
    """Slope (bytes per image) and offset through the two parts nearest to PROBES."""
    few, many = (min(parts, key=lambda n: abs(images // n - probe)) for probe in PROBES)
    low = bytes_of(few)
    if few == many:
        return 0.0, low
    high = bytes_of(many)
    slope = (high - low) / (images // many - images // few)
    return slope, low - slope * (images // few)
