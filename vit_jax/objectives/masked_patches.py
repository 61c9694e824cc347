"""Masked patch prediction: its loss and its metrics (ViT appendix B.1.2)."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from vit_jax.evaluators import classification
from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.evaluator import SumEvaluator
from vit_jax.evaluators.metric import Metric
from vit_jax.models import masked
from vit_jax.objectives.objective import Context, Objective

PATCHES = Metric(
    'patch_accuracy', 'percent', 'highest', 'right colours', 'right colours', legend='top-1'
)
PATCHES_TOP5 = Metric(
    'patch_accuracy_top5', 'percent', 'highest', 'right colours', 'top-5', least_classes=10
)
METRICS = (
    PATCHES,
    PATCHES_TOP5,
    classification.LOSS,
    classification.NUM_EXAMPLES,
    # The same values under their earlier names, for programs that read these names.
    Metric('accuracy', 'percent', 'highest'),
    Metric('accuracy_top5', 'percent', 'highest'),
)

Outputs = dict[str, Array]  # returned by models.masked.MaskedPatches


def masked_patches(context: Context) -> Objective:
    """The prediction of corrupted patches from their tokens (section 4.6)."""
    config = context.config
    module = masked.build(context.model, config.masked, config.preprocess)

    def mean_loss(params, constants, batch, rngs):
        outputs = module.apply({'params': params}, batch['image'], train=True, rngs=rngs)
        return loss(outputs).mean(), {}

    def score(params, batch):
        outputs = module.apply({'params': params}, batch['image'], train=False)
        return sums(outputs, batch)

    return Objective(
        module=module,
        loss=mean_loss,
        evaluator=SumEvaluator(score, finish, METRICS),
        encoder=context.model.clone(num_classes=0),
        encoder_params=operator.itemgetter('vit'),
        uses_labels=False,
    )


def loss(outputs: Outputs) -> Float[Array, ' batch']:
    """Cross-entropy in nats, or squared error: the mean over an image's corrupted patches.

    The loss of a patch is the mean over its parts or pixels.
    """
    predictions = outputs['predictions']
    targets = outputs['targets']
    if _are_colors(outputs):
        values = optax.losses.softmax_cross_entropy_with_integer_labels(predictions, targets)
    else:
        values = jnp.square(predictions - targets)
    return _of_corrupted(values, outputs)


def sums(outputs: Outputs, batch: Batch) -> dict[str, Any]:
    """The sums of classification.logit_sums, where the classes are the colours of patches.

    `correct` is the share of an image's corrupted patches whose colour is predicted. With pixels as
    targets, a pixel is correct if its error is below 1/16 of the range.
    """
    predictions = outputs['predictions']
    targets = outputs['targets']
    if _are_colors(outputs):
        _, top = jax.lax.top_k(predictions, 5)
        hits = (top == targets[..., None]).astype(jnp.float32)
        correct = hits[..., 0]
        correct_top5 = hits.any(axis=-1).astype(jnp.float32)
    else:
        correct = (jnp.abs(predictions - targets) < 2 / 16).astype(jnp.float32)
        correct_top5 = correct
    values = {
        'correct': _of_corrupted(correct, outputs),
        'correct_top5': _of_corrupted(correct_top5, outputs),
        'loss': loss(outputs),
    }
    mask = batch['mask'].astype(jnp.float32)
    return {'count': mask.sum()} | {name: jnp.sum(x, where=mask > 0) for name, x in values.items()}


def finish(totals: dict[str, Any]) -> dict[str, float]:
    """METRICS by name, from the totals of `sums`."""
    values = classification.metrics(totals)
    return values | {
        PATCHES.name: values['accuracy'],
        PATCHES_TOP5.name: values['accuracy_top5'],
    }


def _are_colors(outputs):
    """Whether the targets are colours (classes) instead of pixels."""
    return outputs['predictions'].ndim > outputs['targets'].ndim


def _of_corrupted(values, outputs):
    """The mean [batch] of values [batch, patches, numbers] over the corrupted patches."""
    corrupted = outputs['corrupted']
    return values.mean(-1).sum(-1, where=corrupted) / corrupted.sum(-1)
