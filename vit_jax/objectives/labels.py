"""Classification by labels: cross-entropy with each image's class, or classes."""

import functools

import flax.linen as nn

from vit_jax.evaluators import classification
from vit_jax.evaluators.batches import Batch
from vit_jax.objectives import losses
from vit_jax.objectives.objective import Context, Objective


def labels(context: Context) -> Objective:
    """The loss of `config.loss` between the logits and the labels (ViT section 4.1)."""
    model = context.model
    loss_of = losses.make_loss(**context.config.loss)

    def loss(params, constants, batch, rngs):
        logits = model.apply({'params': params}, batch['image'], train=True, rngs=rngs)
        return loss_of(logits, batch['label']).mean(), {}

    return Objective(
        module=model, loss=loss, sums=score_by_labels(model, context.config), encoder=model
    )


def score_by_labels(model: nn.Module, config):
    """(params, batch) -> sums of classification.logit_sums, with the loss that is not smoothed."""
    loss_of = losses.make_loss(config.loss.name)
    return functools.partial(_sums, model, loss_of)


def _sums(model, loss_of, params, batch: Batch):
    logits = model.apply({'params': params}, batch['image'], train=False)
    return classification.logit_sums(logits, batch, loss_of)
