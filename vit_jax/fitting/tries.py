"""The runs that fit trains: ordinary runs of `training.loop`, each in a workdir of its own."""

import contextlib
import logging
import math
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import models, reporting
from vit_jax.errors import DivergedError
from vit_jax.evaluators import classification
from vit_jax.evaluators.metric import MAIN
from vit_jax.fitting.budget import Plan, Step
from vit_jax.fitting.collect import TEST, TRAIN, VALIDATION
from vit_jax.weights import Weights
from vit_jax.workdir import metrics

log = logging.getLogger(__name__)

RECIPE = 'finetune'  # by name, so that it is found in every folder
# Pixels as the weights expect them, in training and evaluation alike.
_FROM_WEIGHTS = tuple(
    f'preprocess.{name}'
    for name in ('mean', 'std', 'fit', 'crop_ratio', 'resize', 'antialias', 'uint8_resize')
)
EVALUATIONS = 10  # of the long run, at least
EVALUATIONS_OF_A_TRY = 3
_PATIENCE = 6  # the long run ends after this number of evaluations without a better model
AUGMENTATION = {
    'augment.randaugment.num_ops': 2,
    'augment.randaugment.magnitude': 10.0,
    'augment.mixup': 0.2,
}


class Score(NamedTuple):
    """How good a model is on the validation split.

    Attributes:
      accuracy: from 0 to 1; the mean average precision where images have several labels.
      loss: the cross-entropy.
    """

    accuracy: float
    loss: float

    def goodness(self) -> tuple[float, float]:
        """A larger value is a better model: first the accuracy decides, then the loss."""
        return self.accuracy, -self.loss


class Setup(NamedTuple):
    """The settings of all runs.

    Attributes:
      recipe: the config of RECIPE for the weights' model.
      recipe_argument: behind RECIPE on a command line.
      weights: the path of the model of the linear probe, from which runs start.
      model: the fields of its model.
      table: the path of the table of photos.
      multi_label: whether photos have several labels.
      balanced: whether rare classes are shown more often.
      seed: of all runs.
    """

    recipe: ConfigDict
    recipe_argument: str
    weights: str
    model: Mapping[str, Any]
    table: str
    multi_label: bool
    balanced: bool
    seed: int

    def score_names(self) -> tuple[str, str]:
        """The names in metrics.jsonl of the two numbers of a Score."""
        accuracy = classification.ACCURACY
        if self.multi_label:
            accuracy = classification.MEAN_AVERAGE_PRECISION
        return f'{MAIN}/{accuracy.name}', f'{MAIN}/{classification.LOSS.name}'


def recipe_argument(weights: Weights) -> str:
    """The argument of RECIPE for the model of some weights."""
    from vit_jax.models import variants

    name = variants.name_of(weights.model)
    if name is None:
        name = 'b16' if 'hidden_size' in weights.model else 'r50x1'
    return f'{name},directory'


def fields(
    setup: Setup,
    step: Step,
    num_steps: int,
    rate: float,
    epoch_steps: int,
    is_augmented: bool,
    evaluations: int = EVALUATIONS,
) -> dict[str, Any]:
    """The fields of a run that differ from its recipe, by dotted name.

    Args:
      setup: the settings of all runs.
      step: the size of a training step.
      num_steps: of the run.
      rate: the learning rate.
      epoch_steps: steps of an epoch, after which the run is evaluated at the latest.
      is_augmented: whether it uses AUGMENTATION.
      evaluations: the fewest evaluations of the run.
    """
    every = max(1, min(epoch_steps, num_steps // evaluations))
    recipe = config_lib.flatten(setup.recipe)
    values: dict[str, Any] = {
        'pretrained': setup.weights,
        'transfer.keep_head': True,
        'transfer.take': tuple(dict.fromkeys((*setup.recipe.transfer.take, *_FROM_WEIGHTS))),
        'dataset.name': setup.table,
        'dataset.train_split': TRAIN,
        'dataset.eval_split': VALIDATION,
        'dataset.test_split': TEST,
        'dataset.balance': 0.5 if setup.balanced and not setup.multi_label else 0.0,
        'loss.name': 'sigmoid' if setup.multi_label else 'softmax',
        'image_size': step.image_size,
        'batch_size': step.batch_size,
        'accum_steps': step.accum_steps,
        'num_steps': num_steps,
        'optimizer.learning_rate': rate,
        'optimizer.warmup_steps': min(num_steps - 1, math.ceil(num_steps / 10)),
        'eval_every': every,
        'checkpoint_every': every,
        'keep_best': True,
        'best_metric': setup.score_names()[0],
        'patience': _PATIENCE,
        'seed': setup.seed,
    }
    for name, value in setup.model.items():
        if name not in models.PER_MACHINE:
            values[f'model.{name}'] = value
    if is_augmented:
        values |= AUGMENTATION
    return {
        field: value
        for field, value in values.items()
        if recipe.get(field) != (list(value) if isinstance(value, tuple) else value)
    }


def command(setup: Setup, changes: Mapping[str, Any], workdir: str) -> str:
    """The command of vit_jax.main that trains the same run."""
    options = [f'--config={RECIPE}:{setup.recipe_argument}', f'--workdir={workdir}']
    for field, value in changes.items():
        text = ','.join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        options.append(f'--config.{field}={text}')
    return shlex.join(['python', '-m', 'vit_jax.main', *options])


def train(setup: Setup, changes: Mapping[str, Any], workdir: str) -> tuple[int, Score | None]:
    """Train a run, or resume it.

    Returns:
      0, or the exit code after a signal; the score of its best checkpoint, None after a signal or
      where training diverges.
    """
    from vit_jax.training import loop  # imports TensorFlow

    config = config_lib.checked(config_lib.changed(setup.recipe, changes))
    try:
        with _without_its_log_afterwards():
            code = loop.train(config, workdir, log_to_file=True)
    except DivergedError as error:
        log.warning('%s diverges and is not chosen: %s', os.path.basename(workdir), error)
        return 0, None
    recipe = config_lib.flatten(config_lib.with_values_read(setup.recipe))
    reporting.record_recipe(
        workdir, {'file': f'{RECIPE}:{setup.recipe_argument}', 'config': recipe}
    )
    return (code, None) if code else (0, score_of(setup, workdir))


@contextlib.contextmanager
def _without_its_log_afterwards() -> Iterator[None]:
    """Close the train.log of a run at its end: the next lines are of another run."""
    logger = logging.getLogger('vit_jax')
    before = logger.handlers[:]
    try:
        yield
    finally:
        for handler in set(logger.handlers).difference(before):
            logger.removeHandler(handler)
            handler.close()


def score_of(setup: Setup, workdir: str) -> Score | None:
    """The score of the best checkpoint of a run; None without an evaluation."""
    accuracy, loss = setup.score_names()
    scores = [Score(row[accuracy], row[loss]) for row in metrics.read(workdir) if accuracy in row]
    return max(scores, key=Score.goodness, default=None)


def plan_of_tries(plan: Plan, rates_scores: Mapping[str, Any]) -> list[tuple[str, float, bool]]:
    """(name, learning rate, is augmented) of the short runs of a plan.

    Args:
      plan: the planned runs.
      rates_scores: the scores so far by name, which decide the rate of the augmented try.
    """
    if not plan.try_steps:
        return []
    tries = [(f'lr={rate:g}', rate, False) for rate in plan.rates]
    is_complete = all(name in rates_scores for name, *_ in tries)
    scored = [item for item in tries if rates_scores.get(item[0])]  # None: it diverges
    if plan.tries_augmentation and is_complete and scored:
        best = max(scored, key=lambda item: Score(*rates_scores[item[0]]).goodness())
        tries.append((f'{best[0]}_augmented', best[1], True))
    return tries
