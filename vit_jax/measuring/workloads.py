"""What the benchmark times of this project: steps, inference, input, and the hardware's ceiling."""

import functools
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax.parallel import feeding, sharding
from vit_jax.parallel.microbatch import in_parts
from vit_jax.training import accumulation, resolve
from vit_jax.training.program import Program

# Of a config that does not state them: ImageNet-1k's.
NUM_EXAMPLES, NUM_CLASSES = 1_281_167, 1000


class Workload(NamedTuple):
    """Something that is timed."""

    run: Callable[[int], float]  # run(n) computes n steps and returns the seconds that they took
    images: int  # of a step
    flops: int = 0  # of a step, as usually counted; 0: does not compute
    about: dict[str, float] = {}  # seconds of trace, lower, compile, first_step; memory: bytes
    compiled: jax.stages.Compiled | None = None


def complete(config: ConfigDict) -> FrozenConfigDict:
    """A checked config with the numbers of its data, or of ImageNet-1k; no data is read."""
    dataset = config.dataset
    return resolve.with_data(
        resolve.checked(config),
        dataset.num_examples or NUM_EXAMPLES,
        dataset.num_classes or NUM_CLASSES,
        dataset.multi_label,
    )


def synthetic(program: Program) -> dict[str, jax.Array]:
    """A batch of noise with random labels, on the devices."""
    rng, shapes = np.random.default_rng(0), program.abstract_batch
    label = shapes['label']
    batch = {
        'image': rng.standard_normal(shapes['image'].shape, np.float32),
        'label': rng.integers(0, program.config.dataset.num_classes, label.shape).astype(
            label.dtype
        )
        if label.ndim == 1
        else np.zeros(label.shape, label.dtype),
        'mask': np.ones(shapes['mask'].shape, bool),
    }
    return jax.make_array_from_process_local_data(sharding.batch_sharding(program.mesh), batch)


def training(program: Program, batches=None) -> Workload:
    """The training step: of one synthetic batch, or of `batches` as the pipeline makes them.

    Raises UserError if it does not fit in memory.
    """
    about: dict[str, float] = {}
    traced = _timed(about, 'trace', program.trace_train_step)
    lowered = _timed(about, 'lower', traced.lower)
    compiled = _timed(about, 'compile', lowered.compile)
    about['memory'] = accumulation.bytes_needed(compiled)
    accumulation.make_room(about['memory'])
    state = program.initial_state()
    batch = None if batches else synthetic(program)

    def step():
        nonlocal state
        state, values = compiled(state, batch or next(batches))
        return values

    run = functools.partial(seconds_of, step)
    about['first_step'] = run(1)
    return Workload(run, program.config.batch_size, program.flops_per_step(), about, compiled)


def inference(program: Program) -> Workload:
    """Logits of one synthetic batch."""
    params, images = program.initial_state().params, synthetic(program)['image']
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
    """Seconds of `count` steps, at most two of which are on the devices at a time, as in training.

    With 32 XLA (jaxlib 0.10.1) can wait forever on a CPU shown as several devices: to start a step
    on a device that is ahead takes the thread that another needs to catch up.
    """
    start, before = time.perf_counter(), None
    for _ in range(count):
        found = step()
        jax.block_until_ready(before)
        before = found
    jax.block_until_ready(before)
    return time.perf_counter() - start


def input_and_both(config: ConfigDict) -> dict[str, Workload]:
    """The input pipeline of the data of a config, alone and with the training step that it feeds.

    Raises UserError where there is no such data.
    """
    from vit_jax.training import run as run_lib  # imports TensorFlow

    with tempfile.TemporaryDirectory() as workdir:  # of a run that is never begun
        run, _ = run_lib.resolve(config, workdir)
    alone = run.train_batches()
    both = feeding.feed(run.train_batches(), run.program.mesh)
    read = functools.partial(seconds_of, functools.partial(next, alone))
    return {
        'input': Workload(read, run.config.batch_size, 0, {'first_step': read(1)}),
        'train with input': training(run.program, both),
    }


def matmul(program: Program) -> Workload:
    """A product of square matrices on every device: what the hardware reaches, more or less."""
    side = 2048 if jax.default_backend() == 'cpu' else 8192
    devices, dtype = program.mesh.local_devices, program.config.model.dtype
    ones = [jax.device_put(jnp.full((side, side), 1 / side, dtype), device) for device in devices]
    product = jax.jit(
        lambda x, y: jnp.matmul(  # JAX's fastest, see models/backends/cpu.py
            x, y, preferred_element_type=jnp.float32
        ).astype(dtype)
    )

    found = ones

    def step():
        nonlocal found
        found = [product(x, y) for x, y in zip(found, ones, strict=True)]
        return found

    return Workload(functools.partial(seconds_of, step), 0, 2 * side**3 * len(devices))


def _timed(about, name, function):
    start = time.perf_counter()
    value = function()
    about[name] = time.perf_counter() - start
    return value
