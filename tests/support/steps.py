"""A tiny model with its training step, not compiled."""

import functools

import jax

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.training import optimizer, steps
from vit_jax.training import state as train_state

SMALL = dict(patch_size=(4, 4), hidden_size=16, num_layers=2, mlp_dim=24, num_heads=2)


def setup(seed=0, ema=False, optimizer_name='sgd', **model_fields):
    config = config_lib.base()
    config.optimizer.update(name=optimizer_name, learning_rate=0.1, schedule='constant')
    model = models.build(SMALL, 3, **model_fields)
    schedule = optimizer.make_schedule(config.optimizer, 10)
    tx = optimizer.make_optimizer(config.optimizer, schedule)
    state = jax.jit(lambda: train_state.init_state(model, tx, (8, 8, 3), seed, ema))()
    step = functools.partial(steps.train_step, model=model, tx=tx, schedule=schedule,
                             loss=config.loss, seed=seed)
    return state, step, model, config
