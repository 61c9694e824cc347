"""How long large models take to trace and a training step of H/14 to compile; allocates nothing.

    python benchmarks/compile_time.py

Prints seconds for eval_shape of ViT-G/14 and R200x3, then compile times of the training step of
ViT-H/14 (32 layers) and of the same with 4 layers, in turn, with the layers in a scan.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.objectives import registry
from vit_jax.training import optimizer, steps
from vit_jax.training import state as train_state

REPEATS = 3
BATCH = 8


def seconds(function):
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def trace(name):
    """Shapes of all parameters and of the logits."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    jax.eval_shape(models.build(name, 1000).init_with_output, jax.random.key(0), image)


def lower_step(num_layers):
    """The training step of ViT-H/14 with `num_layers` layers, traced and not yet compiled."""
    config = config_lib.base('h14')
    config.model.num_layers = num_layers
    model = models.build(config.model, 1000)
    schedule = optimizer.make_schedule(config.optimizer, num_steps=10)
    tx = optimizer.make_optimizer(config.optimizer, schedule)
    state = jax.eval_shape(
        functools.partial(train_state.init_state, model, tx, (224, 224, 3), seed=0, ema=False)
    )
    batch = {
        'image': jax.ShapeDtypeStruct((BATCH, 224, 224, 3), jnp.float32),
        'label': jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    step = functools.partial(
        steps.train_step,
        objective=registry.build(config, model),
        tx=tx,
        schedule=schedule,
        seed=0,
        options=steps.StepOptions(),
    )
    return jax.jit(step, donate_argnums=0).lower(state, batch)


def main():
    """Measures and prints."""
    for name in ('G14', 'r200x3'):
        print(f'eval_shape of {name}: {seconds(lambda name=name: trace(name)):.2f} s')
    times = {4: [], 32: []}
    for _ in range(REPEATS):
        for layers, measured in times.items():
            jax.clear_caches()
            measured.append(seconds(lower_step(layers).compile))
    for layers, measured in times.items():
        print(
            f'compiling a step of H/14 with {layers} layers: '
            f'{", ".join(f"{t:.2f}" for t in measured)} s'
        )
    print(f'ratio of the medians: {statistics.median(times[32]) / statistics.median(times[4]):.2f}')


if __name__ == '__main__':
    main()
