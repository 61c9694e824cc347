"""Checks whether a run fits in memory, before a step is compiled and before it runs."""

import math

import jax

from vit_jax.data import pipeline
from vit_jax.parallel import feeding, sharding
from vit_jax.training import accumulation
from vit_jax.training.program import Program

# Bytes of host memory that a process allocates between these checks and its first steps.
_START_BYTES = 0.3e9


def program_that_fits(program: Program) -> Program:
    """The program; if `accum_steps` is 0, with the fewest parts of a batch that fit.

    Raises:
      UserError: if the program needs more memory than there is.
    """
    config = program.config
    pixels = math.prod(config.image_size) * config.batch_size // sharding.batch_parts(program.mesh)
    accumulation.check_fits(pixels * 3 * 4, 'a batch of images')
    frozen = ''.join(f', parameters of the {name}' for name in program.objective.frozen)
    accumulation.check_fits(
        sharding.bytes_per_device((program.arguments, program.abstract_state.params)),
        f'the state of a training step (parameters, their gradients, optimizer state{frozen} and '
        'the batch)',
    )
    if config.accum_steps:
        return program
    return accumulation.choose(program, reserved=bytes_besides(program))


def bytes_besides(program: Program) -> float:
    """Bytes per device that prefetched batches and, on a CPU, the process itself need."""
    num_batches = feeding.BATCHES_UNDER_WAY
    process_bytes = 0.0
    if jax.default_backend() == 'cpu':  # the input pipeline and the devices share the memory
        num_batches += pipeline.BATCHES_IN_MEMORY
        process_bytes = _START_BYTES / jax.local_device_count()
    return process_bytes + num_batches * sharding.bytes_per_device(program.abstract_batch['image'])


def make_room(program: Program) -> None:
    """Gives memory back to the system before large steps on a CPU; has no effect on other devices.

    Raises:
      UserError: if the compiled step does not fit; the system would kill the process.
    """
    if jax.default_backend() != 'cpu':
        return
    allocated = sharding.bytes_per_device((program.abstract_state, program.abstract_constants))
    needed = accumulation.bytes_needed(program.train_step) - allocated
    accumulation.make_room(needed + bytes_besides(program))
