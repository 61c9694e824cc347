"""Distillation: a model learns the logits of a teacher (arXiv 2106.05237)."""

from vit_jax.errors import UserError
from vit_jax.objectives import losses
from vit_jax.objectives.labels import score_by_labels
from vit_jax.objectives.objective import Context, FrozenModel, Objective


def distillation(context: Context) -> Objective:
    """The weighted mean of the divergence from a teacher and the loss of the labels.

    The metric `agreement` is the share of images for which the model predicts the teacher's class.

    Raises:
      UserError: if there is no teacher.
    """
    teacher = context.teacher
    model = context.model
    if teacher is None:
        raise UserError(
            f'teacher.weights is {context.config.teacher.weights!r}, and this command has no '
            'teacher: add --config.teacher.weights=',
            kind='missing',
            field='teacher.weights',
            value=context.config.teacher.weights,
        )
    loss_of_labels = losses.make_loss(**context.config.loss)

    def loss(params, constants, batch, rngs):
        logits = model.apply({'params': params}, batch['image'], train=True, rngs=rngs)
        teacher_logits = teacher.logits(constants, batch['image'])
        values = losses.distillation(logits, teacher_logits, teacher.temperature)
        if teacher.share < 1:
            label_values = loss_of_labels(logits, batch['label'])
            values = teacher.share * values + (1 - teacher.share) * label_values
        agreement = (logits.argmax(-1) == teacher_logits.argmax(-1)).mean()
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
