"""One training step and one evaluation step, pure: jit and shardings are applied by the caller."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from ml_collections import ConfigDict

from vit_jax.training import losses, optimizer
from vit_jax.training.state import TrainState

Batch = dict[str, Array]


def train_step(state: TrainState, batch: Batch, *, model: nn.Module,
               tx: optax.GradientTransformation, schedule: optax.Schedule, loss: ConfigDict,
               seed: int, accum_steps: int = 1, ema_decay: float = 0.0, lr_factors: str = '',
               place_grads: Callable[[PyTree], PyTree] = lambda grads: grads
               ) -> tuple[TrainState, dict[str, Array]]:
    """One update from one batch.

    Args:
      state: before the update.
      batch: `image` float32 [batch, height, width, channels], `label` int32 [batch] or float32
        [batch, classes].
      schedule: learning rate by step, reported only; `tx` applies its own.
      loss: `config.loss`.
      seed: randomness of step k is fold_in(key(seed), k).
      accum_steps: the batch is worked off in this many equal parts; equal to the whole at once
        up to rounding, when there is no dropout.
      ema_decay: factor of the parameter average, 0 when `state.ema_params` is None.
      lr_factors: `config.optimizer.lr_factors`; nothing is computed for frozen parameters.
      place_grads: constrains gradients to the devices that hold the parameters.

    Returns:
      The new state, and float32 scalars of this step: loss (nats, mean over the batch),
      grad_norm (of what is trained, before clipping), update_norm, learning_rate.
    """
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)

    def mean_loss(params, batch, key):
        params = optimizer.stop_frozen(params, lr_factors)
        logits = model.apply({'params': params}, batch['image'], train=True,
                             rngs={'dropout': key})
        return losses.classification_loss(logits, batch['label'], **loss).mean()

    def value_and_grad(params, batch, key):
        value, grads = jax.value_and_grad(mean_loss)(params, batch, key)
        return value, place_grads(grads)

    value, grads = accumulate(value_and_grad, state.params, batch, step_key, accum_steps)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema_params = state.ema_params
    if ema_params is not None:
        ema_params = optax.incremental_update(params, ema_params, 1 - ema_decay)
    metrics = {'loss': value, 'grad_norm': optax.tree.norm(grads),
               'update_norm': optax.tree.norm(updates), 'learning_rate': schedule(state.step)}
    return TrainState(state.step + 1, params, opt_state, ema_params), metrics


def accumulate(value_and_grad, params: PyTree, batch: Batch, key: Array, accum_steps: int):
    """Mean of `value_and_grad(params, part, key)` over equal parts of the batch, one at a time."""
    if accum_steps == 1:
        return value_and_grad(params, batch, key)

    def add(total, i_part):
        i, part = i_part
        result = value_and_grad(params, part, jax.random.fold_in(key, i))
        return jax.tree.map(jnp.add, total, result), None

    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                        jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[:1], batch),
                                       key))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(accum_steps), split(batch, accum_steps)))
    return jax.tree.map(lambda x: x / accum_steps, total)


def split(batch: Batch, parts: int) -> Batch:
    """[batch, ...] to [parts, batch / parts, ...].

    A part takes every parts-th example, so that no data moves between devices.
    """
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def eval_step(params: PyTree, batch: Batch, *, model: nn.Module, loss: ConfigDict,
              accum_steps: int = 1) -> dict[str, Array]:
    """Sums over the examples of a batch whose `mask` is set.

    Args:
      batch: as for `train_step`, integer labels, and `mask` [batch], 0 for padding.
      accum_steps: the batch is worked off in this many parts, as in training, to fit in memory.

    Returns:
      float32 scalars: count, correct (top-1), correct_top5 (or fewer classes), loss.
    """
    if accum_steps > 1:
        part_sums = jax.lax.map(
            functools.partial(eval_step, params, model=model, loss=loss), split(batch, accum_steps))
        return jax.tree.map(lambda x: x.sum(axis=0), part_sums)
    return logit_sums(model.apply({'params': params}, batch['image'], train=False), batch, loss)


def logit_sums(logits: Array, batch: Batch, loss: ConfigDict) -> dict[str, Array]:
    """The sums of eval_step from float32 logits [batch, classes]."""
    labels, mask = batch['label'], batch['mask'].astype(jnp.float32)
    _, top = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    hits = top == labels[:, None]
    value = losses.classification_loss(logits, labels, **loss)
    total = functools.partial(jnp.sum, where=mask > 0)
    return {'count': mask.sum(), 'correct': total(hits[:, 0].astype(jnp.float32)),
            'correct_top5': total(hits.any(axis=-1).astype(jnp.float32)), 'loss': total(value)}
