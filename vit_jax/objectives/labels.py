"""Classification: cross-entropy with the class, or the classes, of each image."""

import flax.linen as nn
from ml_collections import ConfigDict

from vit_jax.evaluators import classification
from vit_jax.evaluators.evaluator import SumEvaluator
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
        module=model,
        loss=loss,
        evaluator=score_by_labels(model, context.config),
        encoder=model,
    )


def score_by_labels(model: nn.Module, config: ConfigDict) -> SumEvaluator:
    """The evaluator of a classifier: accuracies, and the loss without smoothing and weights."""

    def logits(params, batch):
        return model.apply({'params': params}, batch['image'], train=False)

    loss_of = losses.make_loss(config.loss.name)
    return classification.classify(logits, loss_of, config.dataset.multi_label)
