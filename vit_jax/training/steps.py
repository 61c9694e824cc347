"""One training step, pure: jit and shardings are applied by the caller."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from vit_jax.evaluators.batches import Batch
from vit_jax.models.parts import split
from vit_jax.training import mixup as mixup_lib
from vit_jax.training import optimizer
from vit_jax.training.state import TrainState
from vit_jax.training.teacher import Teacher


def train_step(
    state: TrainState,
    batch: Batch,
    teacher_params: PyTree = None,
    *,
    model: nn.Module,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    loss: Callable,
    seed: int,
    teacher: Teacher | None = None,
    accum_steps: int = 1,
    ema_decay: float = 0.0,
    mixup: float = 0.0,
    mixup_with: str = 'reversed',
    factors: PyTree | None = None,
    place_grads: Callable[[PyTree], PyTree] = lambda grads: grads,
) -> tuple[TrainState, dict[str, Array]]:
    """One update from one batch.

    Args:
      batch: `image` and `label`, see batches.Batch.
      teacher, teacher_params: whose logits are the targets; None: labels are.
      schedule: only to report the learning rate, which `tx` applies itself.
      loss: from losses.make_loss.
      seed: randomness of step k is fold_in(key(seed), k).
      accum_steps: the batch is split into this many equal parts, whose gradients are averaged;
        without dropout the result equals that of the whole batch up to rounding.
      ema_decay: of the parameter average, if the state has one.
      mixup, mixup_with: alpha and other of mixup.mix, applied to the whole batch before it is
        split; alpha 0: not.
      factors: from optimizer.lr_factors; nothing is computed for parameters whose factor is 0.
      place_grads: constrains gradients to the devices that hold the parameters.

    Returns the new state, with the old parameters if the update is not finite, and float32 scalars
    of this step: loss (nats, mean over the batch), grad_norm (of what is trained, before clipping),
    update_norm, learning_rate; with a teacher also agreement, see Teacher.loss.
    """
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)

    def mean_loss(params, batch, key):
        if factors is not None:
            params = jax.tree.map(
                lambda x, factor: x if factor else jax.lax.stop_gradient(x), params, factors
            )
        logits = model.apply(
            {'params': params},
            batch['image'],
            train=True,
            rngs={'dropout': key, 'corruption': jax.random.fold_in(key, 1)},
        )
        if teacher is not None:
            return teacher.loss(teacher_params, logits, batch, loss)
        return loss(logits, batch['label']).mean(), {}

    def value_and_grad(params, batch, key):
        value, grads = jax.value_and_grad(mean_loss, has_aux=True)(params, batch, key)
        return value, place_grads(grads)

    if mixup:
        batch = mixup_lib.mix(
            batch,
            mixup,
            jax.random.fold_in(step_key, mixup_lib.STREAM),
            model.num_classes,
            mixup_with,
        )
    (value, more), grads = accumulate(value_and_grad, state.params, batch, step_key, accum_steps)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    update_norm = optimizer.norm(updates)
    # Without the condition XLA copies all parameters, to read them for the norm after the update.
    params = optax.tree.where(
        jnp.isfinite(update_norm), optax.apply_updates(state.params, updates), state.params
    )
    ema_params = state.ema_params
    if ema_params is not None:
        ema_params = optax.incremental_update(params, ema_params, 1 - ema_decay)
    metrics = {
        'loss': value,
        **more,
        'grad_norm': optimizer.norm(grads),
        'update_norm': update_norm,
        'learning_rate': schedule(state.step),
    }
    return TrainState(state.step + 1, params, opt_state, ema_params), metrics


def accumulate(value_and_grad, params: PyTree, batch: Batch, key: Array, accum_steps: int):
    """Mean of `value_and_grad(params, part, key)` over equal parts of the batch, one at a time."""
    if accum_steps == 1:
        return value_and_grad(params, batch, key)

    def add(total, i_part):
        i, part = i_part
        result = value_and_grad(params, part, jax.random.fold_in(key, i))
        return jax.tree.map(jnp.add, total, result), None

    one = jax.tree.map(lambda x: x[:1], batch)
    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(value_and_grad, params, one, key))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(accum_steps), split(batch, accum_steps)))
    return jax.tree.map(lambda x: x / accum_steps, total)
