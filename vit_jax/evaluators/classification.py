"""Top-1 and top-5 accuracy, loss and mean average precision, every example counted exactly once."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from vit_jax.errors import UserError
from vit_jax.evaluators import average_precision
from vit_jax.evaluators.batches import Batch
from vit_jax.parallel.microbatch import join, split

MEAN_AVERAGE_PRECISION = 'eval/mean_average_precision'


def total(
    eval_step: Callable,
    params: PyTree,
    batches: Iterable,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Sums over all batches, in float64, which is exact for counts.

    `eval_step` is (params, batch) -> sums, as eval_step() with its other arguments given;
    `batches` are on the devices, with mask 0 for padding and broken images. If `interrupted`, which
    is asked before every batch, None is returned. Arrays in `rows`, with an element for each
    example of a batch, are not summed but joined, without the elements whose `mask` is 0.
    """
    sums, rows = [], []
    for batch in batches:
        if interrupted():
            return None
        found = eval_step(params, batch)
        rows.append(found.pop('rows', {}))
        sums.append(found)
        jax.block_until_ready(sums[-2:-1])  # no more than two batches wait on the devices
        rows[-2:-1] = map(_valid, rows[-2:-1])
    rows[-1:] = map(_valid, rows[-1:])
    totals = {name: sum(np.asarray(s[name], np.float64) for s in sums) for name in sums[0]}
    if rows[0]:
        totals['rows'] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return totals


def _valid(rows):
    """On the host, without those that the mask leaves out."""
    rows = jax.device_get(rows)
    return {name: x[rows['mask'] > 0] for name, x in rows.items() if name != 'mask'}


def metrics(sums: dict[str, Any]) -> dict[str, float]:
    """eval/accuracy and eval/accuracy_top5 in [0, 1], eval/loss in nats, eval/num_examples.

    Of examples with several labels, eval/mean_average_precision in [0, 1], too. Raises UserError if
    there are none.
    """
    count, rows = float(sums['count']), sums.get('rows', {})
    if not count:
        raise UserError(
            'no image of the split has a label, so there is nothing to score: take another split.'
        )
    values = {
        'eval/accuracy': float(sums['correct']) / count,
        'eval/accuracy_top5': float(sums['correct_top5']) / count,
        'eval/loss': float(sums['loss']) / count,
        'eval/num_examples': count,
    }
    if rows and rows['label'].ndim == 2:
        values[MEAN_AVERAGE_PRECISION] = average_precision.mean(rows['logits'], rows['label'])
    return values


def eval_step(
    params: PyTree,
    batch: Batch,
    *,
    sums_of: Callable[[PyTree, Batch], dict[str, Any]],
    accum_steps: int = 1,
) -> dict[str, Any]:
    """Sums over the examples of a batch whose `mask` is set; pure, to be jitted by the caller.

    Args:
      batch: with labels and `mask`, see batches.Batch.
      sums_of: (params, batch) -> sums, as those of logit_sums.
      accum_steps: the batch is split into this many equal parts, which are computed one after the
        other, as in training, to fit in memory.
    """
    if accum_steps == 1:
        return sums_of(params, batch)
    sums = jax.lax.map(functools.partial(sums_of, params), split(batch, accum_steps))
    rows = {'rows': join(sums.pop('rows'))} if 'rows' in sums else {}
    return jax.tree.map(lambda x: x.sum(axis=0), sums) | rows


def logit_sums(
    logits: Float[Array, 'batch classes'], batch: Batch, loss: Callable
) -> dict[str, Any]:
    """The sums of eval_step from the logits of a batch.

    Returns float32 scalars: count, correct (top-1), correct_top5 (or fewer classes), loss. Examples
    with one label also have class_count and class_correct, float32 [classes]: count and correct of
    the examples of each class. An example with several labels is right if one of them is found; one
    without any is left out, as in big_vision (evaluators/classification.py). Of these `rows` has
    logits, label (bool) and mask.
    """
    labels, mask = batch['label'], batch['mask'].astype(jnp.float32)
    more = {}
    if labels.ndim == 2:
        mask = mask * (labels > 0).any(axis=-1)
        more['rows'] = {'logits': logits, 'label': labels > 0, 'mask': mask}
    hits = top_hits(logits, labels)
    if labels.ndim == 1:
        by_class = functools.partial(
            jax.ops.segment_sum, segment_ids=labels, num_segments=logits.shape[-1]
        )
        more['class_count'] = by_class(mask)
        more['class_correct'] = by_class(mask * hits[:, 0])
    values = loss(logits, labels)
    summed = functools.partial(jnp.sum, where=mask > 0)
    return {
        'count': mask.sum(),
        'correct': summed(hits[:, 0].astype(jnp.float32)),
        'correct_top5': summed(hits.any(axis=-1).astype(jnp.float32)),
        'loss': summed(values),
        **more,
    }


def top_hits(
    logits: Float[Array, 'batch classes'],
    labels: Int[Array, ' batch'] | Float[Array, 'batch classes'],
) -> Array:
    """Whether each of the five most probable classes, best first, is a label: bool [batch, 5]."""
    _, top = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    if labels.ndim == 2:
        return jnp.take_along_axis(labels, top, axis=-1) > 0
    return top == labels[:, None]
