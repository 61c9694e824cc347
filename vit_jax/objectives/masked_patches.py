"""Masked patch prediction: the loss and how it is scored (ViT appendix B.1.2)."""

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
    # The same hits by the names that earlier versions gave them, for those who read these.
    Metric('accuracy', 'percent', 'highest'),
    Metric('accuracy_top5', 'percent', 'highest'),
)

Outputs = dict[str, Array]  # of models.masked.MaskedPatches


def masked_patches(context: Context) -> Objective:
    """Predicts corrupted patches from the tokens at their places (section 4.6)."""
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
    """Mean over the corrupted patches of each image: cross-entropy in nats, or squared error.

    The value of a patch is the mean over its parts or pixels.
    """
    predictions, targets = outputs['predictions'], outputs['targets']
    if _are_colors(outputs):
        values = optax.losses.softmax_cross_entropy_with_integer_labels(predictions, targets)
    else:
        values = jnp.square(predictions - targets)
    return _of_corrupted(values, outputs)


def sums(outputs: Outputs, batch: Batch) -> dict[str, Any]:
    """As classification.logit_sums, where colours of patches take the place of classes.

    Correct is the share of right colours among the corrupted patches of an image. Where pixels are
    predicted there are none: what is correct has an error of less than a sixteenth of the range.
    """
    predictions, targets = outputs['predictions'], outputs['targets']
    if _are_colors(outputs):
        _, top = jax.lax.top_k(predictions, 5)
        hits = (top == targets[..., None]).astype(jnp.float32)
        first, any_of_five = hits[..., 0], hits.any(axis=-1).astype(jnp.float32)
    else:
        first = any_of_five = (jnp.abs(predictions - targets) < 2 / 16).astype(jnp.float32)
    values = {
        'correct': _of_corrupted(first, outputs),
        'correct_top5': _of_corrupted(any_of_five, outputs),
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
    return outputs['predictions'].ndim > outputs['targets'].ndim


def _of_corrupted(values, outputs):
    """[batch, patches, ...] to means over the corrupted patches of each image, [batch]."""
    corrupted = outputs['corrupted']
    return values.mean(-1).sum(-1, where=corrupted) / corrupted.sum(-1)
