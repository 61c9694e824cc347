"""A tiny model with its uncompiled training step, and random batches."""

import functools

import jax
import numpy as np

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.objectives import registry
from vit_jax.training import optimizer, steps
from vit_jax.training import state as train_state

SMALL = dict(patch_size=(4, 4), hidden_size=16, num_layers=2, mlp_dim=24, num_heads=2)


@functools.cache
def setup(seed=0, ema=False, lr_factors='', optimizer_name='sgd', **model_fields):
    """(state, step, model, config) with a constant learning rate, cached.

    Copy the state before you donate its buffers.
    """
    config = config_lib.base()
    config.optimizer.update(name=optimizer_name, learning_rate=0.1, schedule='constant')
    model = models.build(SMALL, 3, **model_fields)
    schedule = optimizer.make_schedule(config.optimizer, 10)
    params = jax.eval_shape(model.init, jax.random.key(seed), np.zeros((1, 8, 8, 3)))['params']
    factors = optimizer.lr_factors(params, lr_factors)
    tx = optimizer.make_optimizer(config.optimizer, schedule, factors)
    state = jax.jit(lambda: train_state.init_state(model, tx, (8, 8, 3), seed, ema))()
    config.dataset.num_classes = 3
    objective = registry.build(config, model)

    def step(state, batch, constants=(), objective=objective, **options):
        options = {'factors': factors, 'num_classes': 3} | options
        return steps.train_step(
            state,
            batch,
            constants,
            objective=objective,
            tx=tx,
            schedule=schedule,
            seed=seed,
            options=steps.StepOptions(**options),
        )

    return state, step, model, config


def random_batch(size, seed=0):
    rng = np.random.default_rng(seed)
    return {
        'image': rng.uniform(-1, 1, (size, 8, 8, 3)).astype(np.float32),
        'label': rng.integers(0, 3, size).astype(np.int32),
        'mask': np.ones(size, bool),
    }


def assert_close(a, b, rtol=1e-5):
    """Asserts that every array differs by at most rtol of its largest element."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(np.abs(y).max(), 1e-3))
