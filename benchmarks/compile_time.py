"""Measures the time to trace large models and to compile a training step; allocates nothing.

    python benchmarks/compile_time.py

Prints the seconds of eval_shape for ViT-G/14 and R200x3. Then it prints the compile times of the
training step of ViT-H/14 with its 32 layers and with 4 layers, which alternate. The layers are in a
scan.
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
    """Returns the seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def trace(name):
    """Traces a model, for the shapes of all parameters and of the logits."""
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    jax.eval_shape(models.build(name, 1000).init_with_output, jax.random.key(0), image)


def lower_step(num_layers):
    """Returns the training step of ViT-H/14 with `num_layers` layers, lowered and not compiled."""
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
        for num_layers, times_of_depth in times.items():
            jax.clear_caches()
            times_of_depth.append(seconds(lower_step(num_layers).compile))
    for num_layers, times_of_depth in times.items():
        texts = ', '.join(f'{time:.2f}' for time in times_of_depth)
        print(f'compiling a step of H/14 with {num_layers} layers: {texts} s')
    print(f'ratio of the medians: {statistics.median(times[32]) / statistics.median(times[4]):.2f}')


if __name__ == '__main__':
    main()
