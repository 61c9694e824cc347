"""One training step as a pure function; the caller applies jit and shardings."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from vit_jax.evaluators.batches import Batch
from vit_jax.objectives.objective import Objective
from vit_jax.parallel.microbatch import split
from vit_jax.training import mixup as mixup_lib
from vit_jax.training import optimizer
from vit_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a training step apart from its objective and optimizer.

    Attributes:
      accum_steps: number of equal parts of the batch, whose gradients are averaged. Without dropout
        the result equals the result for the whole batch up to rounding.
      ema_decay: the decay of the parameter average, if the state has one.
      mixup: alpha of mixup.mix, which mixes the whole batch before it is split; 0 for no MixUp.
      mixup_with: the argument `other` of mixup.mix.
      num_classes: the number of classes, for mixed labels.
      factors: the factors from optimizer.lr_factors. Parameters with factor 0 need no gradient.
      place_grads: a function that constrains gradients to the shardings of the parameters.
    """

    accum_steps: int = 1
    ema_decay: float = 0.0
    mixup: float = 0.0
    mixup_with: str = 'reversed'
    num_classes: int = 0
    factors: PyTree | None = None
    place_grads: Callable[[PyTree], PyTree] = lambda grads: grads


def train_step(
    state: TrainState,
    batch: Batch,
    constants: PyTree = (),
    *,
    objective: Objective,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    seed: int,
    options: StepOptions,
) -> tuple[TrainState, dict[str, Array]]:
    """Updates the state with one batch (ViT section 4.1).

    Args:
      state: the state before the step.
      batch: `image` and `label`, see batches.Batch.
      constants: the arrays of `objective.constants`, on the devices.
      objective: the loss to minimise.
      tx: the optimizer, which applies the learning rate.
      schedule: the learning-rate schedule, for the reported `learning_rate`.
      seed: step k uses the random key fold_in(key(seed), k).
      options: further options of the step.

    Returns:
      The new state, and float32 scalars of this step: `loss` (nats, mean over the batch), the
      metrics of the objective, `grad_norm` (of trained parameters, before clipping), `update_norm`
      and `learning_rate`. If the update is not finite, the new state has the old parameters.
    """
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)

    def mean_loss(params, batch, key):
        if options.factors is not None:
            params = jax.tree.map(_trained, params, options.factors)
        rngs = {'dropout': key, 'corruption': jax.random.fold_in(key, 1)}
        return objective.loss(params, constants, batch, rngs)

    def value_and_grad(params, batch, key):
        value, grads = jax.value_and_grad(mean_loss, has_aux=True)(params, batch, key)
        return value, options.place_grads(grads)

    if options.mixup:
        mix_key = jax.random.fold_in(step_key, mixup_lib.STREAM)
        batch = mixup_lib.mix(
            batch, options.mixup, mix_key, options.num_classes, options.mixup_with
        )
    (value, metrics), grads = accumulate(
        value_and_grad, state.params, batch, step_key, options.accum_steps
    )
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    update_norm = optimizer.norm(updates)
    # Without this condition XLA copies all parameters to compute the norm after the update.
    params = optax.tree.where(
        jnp.isfinite(update_norm), optax.apply_updates(state.params, updates), state.params
    )
    ema_params = state.ema_params
    if ema_params is not None:
        ema_params = optax.incremental_update(params, ema_params, 1 - options.ema_decay)
    metrics = {
        'loss': value,
        **metrics,
        'grad_norm': optimizer.norm(grads),
        'update_norm': update_norm,
        'learning_rate': schedule(state.step),
    }
    return TrainState(state.step + 1, params, opt_state, ema_params), metrics


def _trained(array, factor):
    """The array, without a gradient if its factor is 0."""
    return array if factor else jax.lax.stop_gradient(array)


def accumulate(value_and_grad, params: PyTree, batch: Batch, key: Array, accum_steps: int):
    """Mean of `value_and_grad(params, part, key)` over equal parts of the batch, one at a time."""
    if accum_steps == 1:
        return value_and_grad(params, batch, key)

    def add(total, number_and_part):
        i, part = number_and_part
        result = value_and_grad(params, part, jax.random.fold_in(key, i))
        return jax.tree.map(jnp.add, total, result), None

    one_example = jax.tree.map(lambda x: x[:1], batch)
    shapes = jax.eval_shape(value_and_grad, params, one_example, key)
    zero = jax.tree.map(jnp.zeros_like, shapes)
    total, _ = jax.lax.scan(add, zero, (jnp.arange(accum_steps), split(batch, accum_steps)))
    return jax.tree.map(lambda x: x / accum_steps, total)
