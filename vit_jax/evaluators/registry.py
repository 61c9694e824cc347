"""The evaluator that a config or a command names."""

from vit_jax import plugins
from vit_jax.errors import UserError
from vit_jax.evaluators import classification, frozen
from vit_jax.evaluators.context import Context
from vit_jax.evaluators.evaluator import Evaluator, SumEvaluator


def classify(context: Context) -> SumEvaluator:
    """Accuracy, top-5 accuracy and loss; with several labels also the mean average precision."""
    context.require_classes()
    multi_label = context.test.source.multi_label
    return classification.classify(context.logits, context.loss, multi_label)


TYPES = {
    'classification': classify,
    'fewshot': frozen.few_shot,
    'knn': frozen.nearest_neighbours,
    'linear_probe': frozen.linear_probe,
}


def build(kind: str, field: str, context: Context) -> Evaluator | SumEvaluator:
    """The evaluator of a type.

    Args:
      kind: a key of TYPES or PACKAGE.MODULE:FUNCTION.
      field: the field or option with the type, for messages.
      context: argument of the function.

    Raises:
      UserError: if the function cannot be imported, returns no evaluator, or does not read one of
        the options.
    """
    make = TYPES.get(kind)
    if make is None:
        make = plugins.imported(kind, field, TYPES)
    evaluator = make(context)
    if not isinstance(evaluator, Evaluator | SumEvaluator):
        raise UserError(
            f'{field} is {kind!r}, which returned {type(evaluator).__name__}: expected a '
            'SumEvaluator or an Evaluator of vit_jax.evaluators.evaluator.',
            kind='value',
            field=field,
            value=kind,
        )
    context.options.require_all_known()
    return evaluator
