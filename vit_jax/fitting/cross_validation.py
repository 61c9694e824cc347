"""The accuracy of the linear probe on unseen photos; each photo is held out once."""

import logging
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from vit_jax.data import grouped_split
from vit_jax.errors import UserError, counted
from vit_jax.fitting import probe

log = logging.getLogger(__name__)

FEWEST_FOLDS, MOST_FOLDS = 2, 20


class CrossValidation(NamedTuple):
    """The scores of a probe by cross-validation.

    Attributes:
      accuracies: of each fold, from 0 to 1; mean average precisions where photos have several
        labels.
      mean: of the accuracies.
      standard_error: their sample standard deviation over the root of their number.
      num_images: photos in all folds.
    """

    accuracies: list[float]
    mean: float
    standard_error: float
    num_images: int


def check_count(count: int) -> None:
    """Raises UserError unless `count` is 0, no cross-validation, or a number of folds."""
    if count == 0 or FEWEST_FOLDS <= count <= MOST_FOLDS:
        return
    raise UserError(
        f'--folds is {count}: expected a number from {FEWEST_FOLDS} to {MOST_FOLDS}.',
        kind='value',
        field='--folds',
        value=count,
    )


def cut(
    targets: Bool[np.ndarray, 'images classes'], groups: Int[np.ndarray, ' images'], count: int
) -> Int[np.ndarray, ' images']:
    """The number of the fold of each photo, from 0. Classes are in proportion, groups together.

    Raises:
      UserError: if there are fewer groups than folds.
    """
    num_groups = len(np.unique(groups))
    if num_groups < count:
        raise UserError(
            f'--folds is {count}, and the photos of train and val are in '
            f'{counted(num_groups, "group")}: expected at most {num_groups} folds, because near '
            'duplicates stay in one fold. Use fewer folds, or add photos.',
            kind='value',
            field='--folds',
            value=count,
        )
    return grouped_split.cut(targets, groups, [1 / count] * count)


def score(
    probabilities: Float[np.ndarray, 'images classes'],
    targets: Bool[np.ndarray, 'images classes'],
    folds: Int[np.ndarray, ' images'],
    multi_label: bool,
) -> CrossValidation:
    """Score each fold.

    Args:
      probabilities: of each photo, by a probe that has not seen its fold.
      targets: whether a photo shows a class.
      folds: the number of the fold of each photo.
      multi_label: whether photos may have several labels.
    """
    accuracies = [
        probe.accuracy(probabilities[folds == fold], targets[folds == fold], multi_label)
        for fold in np.unique(folds)
    ]
    return CrossValidation(
        accuracies,
        float(np.mean(accuracies)),
        float(np.std(accuracies, ddof=1) / math.sqrt(len(accuracies))),
        len(folds),
    )


def report(result: CrossValidation) -> None:
    """Log the mean and its standard error."""
    log.info(
        'The linear probe has %.2f %% by cross-validation, standard error %.2f %%: the mean over '
        '%d folds of the %d photos of train and val',
        100 * result.mean,
        100 * result.standard_error,
        len(result.accuracies),
        result.num_images,
    )
