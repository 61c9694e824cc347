"""The workloads of this project: steps, inference, input, and a matrix product as the ceiling."""

import functools
import itertools
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib
from vit_jax.parallel import feeding, sharding
from vit_jax.parallel.microbatch import in_parts
from vit_jax.training import accumulation, resolve
from vit_jax.training.program import Program

# Numbers of ImageNet-1k, for a config without numbers of its data.
NUM_EXAMPLES = 1_281_167
NUM_CLASSES = 1000


class Workload(NamedTuple):
    """A function to time."""

    run: Callable[[int], float]  # run(n) computes n steps and returns the seconds that they took
    images: int  # number of images of a step
    flops: int = 0  # FLOPs of a step; backward counts as twice forward; 0: no computation
    about: dict[str, float] = {}  # seconds of trace, lower, compile, first_step; bytes of memory
    compiled: jax.stages.Compiled | None = None


def complete(config: ConfigDict) -> FrozenConfigDict:
    """Returns a checked config with the numbers of its data, or of ImageNet-1k; reads no data."""
    dataset = config.dataset
    return resolve.with_data(
        config_lib.checked(config),
        dataset.num_examples or NUM_EXAMPLES,
        dataset.num_classes or NUM_CLASSES,
        dataset.multi_label,
    )


def synthetic(program: Program) -> dict[str, jax.Array]:
    """Returns a batch of noise on the devices, with random labels, or zeros for several labels."""
    shapes = program.abstract_batch
    rng = np.random.default_rng(0)
    images = rng.standard_normal(shapes['image'].shape, np.float32)
    label = shapes['label']
    if label.ndim == 1:
        labels = rng.integers(0, program.config.dataset.num_classes, label.shape)
    else:
        labels = np.zeros(label.shape)
    batch = {
        'image': images,
        'label': labels.astype(label.dtype),
        'mask': np.ones(shapes['mask'].shape, bool),
    }
    return jax.make_array_from_process_local_data(sharding.batch_sharding(program.mesh), batch)


def training(program: Program, batches=None) -> Workload:
    """Returns the training step.

    Args:
      program: the program of a complete config.
      batches: an iterator of batches on the devices; None: one synthetic batch for all steps.

    Raises:
      UserError: the step does not fit in memory.
    """
    about: dict[str, float] = {}
    traced = _timed(about, 'trace', program.trace_train_step)
    lowered = _timed(about, 'lower', traced.lower)
    compiled = _timed(about, 'compile', lowered.compile)
    about['memory'] = accumulation.bytes_needed(compiled)
    accumulation.make_room(about['memory'])
    state = program.initial_state()
    if batches is None:
        batches = itertools.repeat(synthetic(program))

    def step():
        nonlocal state
        state, metrics = compiled(state, next(batches))
        return metrics

    run = functools.partial(seconds_of, step)
    about['first_step'] = run(1)
    return Workload(run, program.config.batch_size, program.flops_per_step(), about, compiled)


def inference(program: Program) -> Workload:
    """Returns inference: the logits of one synthetic batch."""
    params = program.initial_state().params
    images = synthetic(program)['image']
    with sharding.on_mesh(program.mesh):
        logits = program.model.backend.jit(
            lambda params, images: in_parts(
                functools.partial(program.model.apply, {'params': params}),
                images,
                program.eval_parts,
            ),
        )
        about: dict[str, float] = {}
        lowered = logits.lower(params, images)
        compiled = _timed(about, 'compile', lowered.compile)
    about['memory'] = accumulation.bytes_needed(compiled)

    run = functools.partial(seconds_of, functools.partial(compiled, params, images))
    return Workload(run, len(images), program.flops_per_step() // 3, about, compiled)


def seconds_of(step: Callable[[], PyTree], count: int) -> float:
    """Returns the seconds of `count` steps.

    At most two steps are on the devices at a time, as in training. With 32 steps XLA (jaxlib
    0.10.1) can wait forever on a CPU shown as several devices: starting a step on a fast device
    occupies the thread that a slower device needs.
    """
    start = time.perf_counter()
    previous = None
    for _ in range(count):
        current = step()
        jax.block_until_ready(previous)
        previous = current
    jax.block_until_ready(previous)
    return time.perf_counter() - start


def input_and_both(config: ConfigDict) -> dict[str, Workload]:
    """Returns the input pipeline of a config's data set, alone and with the training step.

    Raises:
      UserError: the data set is missing.
    """
    from vit_jax.training import run as run_lib  # imports TensorFlow

    with tempfile.TemporaryDirectory() as workdir:  # the run never starts
        run, _ = run_lib.resolve(config, workdir)
    alone = run.train_batches()
    both = feeding.feed(run.train_batches(), run.program.mesh)
    read = functools.partial(seconds_of, functools.partial(next, alone))
    return {
        'input': Workload(read, run.config.batch_size, 0, {'first_step': read(1)}),
        'train with input': training(run.program, both),
    }


def matmul(program: Program) -> Workload:
    """Returns a product of square matrices on every device, an estimate of the hardware's peak."""
    side = 2048 if jax.default_backend() == 'cpu' else 8192
    devices = program.mesh.local_devices
    dtype = program.config.model.dtype
    factors = [
        jax.device_put(jnp.full((side, side), 1 / side, dtype), device) for device in devices
    ]

    @jax.jit
    def multiply(x, y):  # in the fastest form on a CPU, see models/backends/cpu.py
        return jnp.matmul(x, y, preferred_element_type=jnp.float32).astype(dtype)

    products = factors

    def step():
        nonlocal products
        products = [multiply(x, y) for x, y in zip(products, factors, strict=True)]
        return products

    return Workload(functools.partial(seconds_of, step), 0, 2 * side**3 * len(devices))


def _timed(about, name, function):
    start = time.perf_counter()
    value = function()
    about[name] = time.perf_counter() - start
    return value
