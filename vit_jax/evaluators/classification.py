"""Top-1 and top-5 accuracy, loss and mean average precision; every example counts once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from vit_jax.errors import UserError
from vit_jax.evaluators import average_precision
from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.evaluator import SumEvaluator
from vit_jax.evaluators.metric import Metric

ACCURACY = Metric('accuracy', 'percent', 'highest', 'accuracy', legend='top-1', title='Accuracy')
TOP5 = Metric('accuracy_top5', 'percent', 'highest', 'accuracy', 'top-5', least_classes=10)
MEAN_AVERAGE_PRECISION = Metric(
    'mean_average_precision', 'percent', 'highest', 'accuracy', 'mAP', 'mean average precision'
)
LOSS = Metric('loss', 'number', 'lowest', 'loss', legend='evaluation', title='Evaluation loss')
NUM_EXAMPLES = Metric('num_examples', 'count')
METRICS = (ACCURACY, TOP5, MEAN_AVERAGE_PRECISION, LOSS, NUM_EXAMPLES)


def classify(
    logits: Callable[[PyTree, Batch], Array], loss: Callable, multi_label: bool
) -> SumEvaluator:
    """The evaluator of a classifier.

    Args:
      logits: (params, batch) -> logits [batch, classes].
      loss: (logits, labels) -> the loss of each example in nats.
      multi_label: whether an image may have several labels; then there is an average precision.
    """

    def sums(params, batch):
        return logit_sums(logits(params, batch), batch, loss)

    described = [m for m in METRICS if multi_label or m != MEAN_AVERAGE_PRECISION]
    return SumEvaluator(sums, metrics, described)


def classify_in_detail(
    logits: Callable[[PyTree, Batch], Array],
    loss: Callable,
    multi_label: bool,
    probabilities: Callable[[Array], Array],
    with_logits: bool = False,
) -> SumEvaluator:
    """The evaluator of a classifier, with a row for each image.

    Args:
      logits: see `classify`.
      loss: see `classify`.
      multi_label: see `classify`.
      probabilities: maps logits to probabilities of the classes.
      with_logits: whether rows have logits. Rows of images with several labels always have them.

    Returns:
      The evaluator, for batches with `index`. Its rows have index, label, predicted (the most
      probable class), confidence (the probability of this class) and right (whether it is a label).
    """

    def sums(params, batch):
        batch_logits = logits(params, batch)
        batch_sums = logit_sums(batch_logits, batch, loss)
        rows = {name: batch[name] for name in ('index', 'label', 'mask')}
        rows |= {
            'predicted': batch_logits.argmax(-1),
            'confidence': probabilities(batch_logits).max(-1),
            'right': top_hits(batch_logits, batch['label'])[:, 0],
        }
        if with_logits:
            rows['logits'] = batch_logits
        return batch_sums | {'rows': rows | batch_sums.get('rows', {})}

    return dataclasses.replace(classify(logits, loss, multi_label), sums=sums)


def metrics(sums: dict[str, Any]) -> dict[str, float]:
    """The METRICS by name: accuracies in [0, 1], the loss in nats, and the number of examples.

    Only examples with several labels have a mean average precision, in [0, 1].

    Raises:
      UserError: if there are no examples.
    """
    count = float(sums['count'])
    rows = sums.get('rows', {})
    if not count:
        raise UserError(
            'no image of the split has a label, so there is nothing to score: use another split.',
            kind='content',
        )
    values = {
        ACCURACY.name: float(sums['correct']) / count,
        TOP5.name: float(sums['correct_top5']) / count,
        LOSS.name: float(sums['loss']) / count,
        NUM_EXAMPLES.name: count,
    }
    if rows and rows['label'].ndim == 2:
        precision = average_precision.mean(rows['logits'], rows['label'])
        values[MEAN_AVERAGE_PRECISION.name] = precision
    return values


def logit_sums(
    logits: Float[Array, 'batch classes'], batch: Batch, loss: Callable
) -> dict[str, Any]:
    """The sums over a batch from its logits.

    Returns:
      The float32 scalars `count`, `correct` (top-1), `correct_top5` (with fewer than five classes:
      all of them) and `loss`. With one label per example there are also `class_count` and
      `class_correct`, float32 [classes]: count and correct for the examples of each class. With
      several labels per example there are also `rows` with logits, label (bool) and mask. Such an
      example is correct if one of its labels is predicted; an example without labels does not
      count, as in big_vision (evaluators/classification.py).
    """
    labels = batch['label']
    mask = batch['mask'].astype(jnp.float32)
    label_sums: dict[str, Array | dict[str, Array]] = {}
    if labels.ndim == 2:
        mask = mask * (labels > 0).any(axis=-1)
        label_sums['rows'] = {'logits': logits, 'label': labels > 0, 'mask': mask}
    hits = top_hits(logits, labels)
    if labels.ndim == 1:
        by_class = functools.partial(
            jax.ops.segment_sum, segment_ids=labels, num_segments=logits.shape[-1]
        )
        label_sums['class_count'] = by_class(mask)
        label_sums['class_correct'] = by_class(mask * hits[:, 0])
    values = loss(logits, labels)
    summed = functools.partial(jnp.sum, where=mask > 0)
    return {
        'count': mask.sum(),
        'correct': summed(hits[:, 0].astype(jnp.float32)),
        'correct_top5': summed(hits.any(axis=-1).astype(jnp.float32)),
        'loss': summed(values),
        **label_sums,
    }


def top_hits(
    logits: Float[Array, 'batch classes'],
    labels: Int[Array, ' batch'] | Float[Array, 'batch classes'],
) -> Array:
    """Whether each of the five most probable classes is a label; bool [batch, 5], best first."""
    _, top = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    if labels.ndim == 2:
        return jnp.take_along_axis(labels, top, axis=-1) > 0
    return top == labels[:, None]
