"""Top-1 and top-5 accuracy and loss, every example counted exactly once."""

import functools
from collections.abc import Callable, Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from vit_jax.evaluators.batches import Batch, split


def total(eval_step: Callable, params: PyTree, batches: Iterable,
          interrupted: Callable[[], bool] = lambda: False) -> dict[str, np.ndarray] | None:
    """Sums over all batches, in float64, which is exact for counts.

    `eval_step` is (params, batch) -> sums, as eval_step() with its other arguments given;
    `batches` are on the devices, with mask 0 for padding and broken images. If `interrupted`, which
    is asked before every batch, None is returned.
    """
    sums = []
    for batch in batches:
        if interrupted():
            return None
        sums.append(eval_step(params, batch))
        jax.block_until_ready(sums[-2:-1])  # no more than two batches wait on the devices
    return {name: sum(np.asarray(s[name], np.float64) for s in sums) for name in sums[0]}


def metrics(sums: dict[str, np.ndarray]) -> dict[str, float]:
    """eval/accuracy and eval/accuracy_top5 in [0, 1], eval/loss in nats, eval/num_examples."""
    count = float(sums['count'])
    return {'eval/accuracy': float(sums['correct']) / count,
            'eval/accuracy_top5': float(sums['correct_top5']) / count,
            'eval/loss': float(sums['loss']) / count,
            'eval/num_examples': count}


def eval_step(params: PyTree, batch: Batch, *, model: nn.Module, loss: Callable,
              accum_steps: int = 1) -> dict[str, Float[Array, '']]:
    """Sums over the examples of a batch whose `mask` is set; pure, to be jitted by the caller.

    Args:
      batch: with integer labels and `mask`, see batches.Batch.
      loss: (logits, labels) -> one value per example.
      accum_steps: the batch is split into this many equal parts, which are computed one after the
        other, as in training, to fit in memory.

    Returns float32 scalars: count, correct (top-1), correct_top5 (or fewer classes), loss.
    """
    if accum_steps > 1:
        sums = jax.lax.map(functools.partial(eval_step, params, model=model, loss=loss),
                           split(batch, accum_steps))
        return jax.tree.map(lambda x: x.sum(axis=0), sums)
    return logit_sums(model.apply({'params': params}, batch['image'], train=False), batch, loss)


def logit_sums(logits: Float[Array, 'batch classes'], batch: Batch, loss: Callable
               ) -> dict[str, Float[Array, '']]:
    """The sums of eval_step from the logits of a batch."""
    labels, mask = batch['label'], batch['mask'].astype(jnp.float32)
    _, top = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    hits = top == labels[:, None]
    values = loss(logits, labels)
    summed = functools.partial(jnp.sum, where=mask > 0)
    return {'count': mask.sum(), 'correct': summed(hits[:, 0].astype(jnp.float32)),
            'correct_top5': summed(hits.any(axis=-1).astype(jnp.float32)), 'loss': summed(values)}
