"""One training step, pure: jit and shardings are applied by the caller."""

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
    """How a training step is computed, besides its objective and optimizer.

    Attributes:
      accum_steps: the batch is split into this many equal parts, whose gradients are averaged;
        without dropout the result equals that of the whole batch up to rounding.
      ema_decay: of the parameter average, if the state has one.
      mixup, mixup_with: alpha and other of mixup.mix, applied to the whole batch before it is
        split; alpha 0: not.
      num_classes: of the targets that MixUp makes.
      factors: from optimizer.lr_factors; nothing is computed for parameters whose factor is 0.
      place_grads: constrains gradients to the devices that hold the parameters.
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
    """One update from one batch (ViT section 4.1).

    Args:
      batch: `image` and `label`, see batches.Batch.
      constants: the arrays of `objective.constants`, on the devices.
      schedule: only to report the learning rate, which `tx` applies itself.
      seed: randomness of step k is fold_in(key(seed), k).

    Returns the new state, with the old parameters if the update is not finite, and float32 scalars
    of this step: loss (nats, mean over the batch), those of the objective, grad_norm (of what is
    trained, before clipping), update_norm, learning_rate.
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
    # Without the condition XLA copies all parameters, to read them for the norm after the update.
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
    """The array, of which no gradient is computed if its factor is 0."""
    return array if factor else jax.lax.stop_gradient(array)


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
