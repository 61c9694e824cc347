"""Distillation: the logits of a teacher are the targets (arXiv 2106.05237)."""

from vit_jax.errors import UserError
from vit_jax.objectives import losses
from vit_jax.objectives.labels import score_by_labels
from vit_jax.objectives.objective import Context, FrozenModel, Objective


def distillation(context: Context) -> Objective:
    """The divergence from a teacher's probabilities, and the loss of labels for the other share.

    `agreement` is the share of images whose most probable class is the teacher's.
    """
    teacher = context.teacher
    model = context.model
    if teacher is None:
        raise UserError(
            f'teacher.weights is {context.config.teacher.weights!r}, and this command has no '
            'teacher: add --config.teacher.weights='
        )
    loss_of_labels = losses.make_loss(**context.config.loss)

    def loss(params, constants, batch, rngs):
        logits = model.apply({'params': params}, batch['image'], train=True, rngs=rngs)
        wanted = teacher.logits(constants, batch['image'])
        values = losses.distillation(logits, wanted, teacher.temperature)
        if teacher.share < 1:
            of_labels = loss_of_labels(logits, batch['label'])
            values = teacher.share * values + (1 - teacher.share) * of_labels
        agreement = (logits.argmax(-1) == wanted.argmax(-1)).mean()
        return values.mean(), {'agreement': agreement}

    return Objective(
        module=model,
        loss=loss,
        evaluator=score_by_labels(model, context.config),
        encoder=model,
        constants=teacher.params,
        frozen={'teacher': FrozenModel(teacher.model, teacher.fields, teacher.image_size)},
        uses_labels=teacher.share < 1,
    )
