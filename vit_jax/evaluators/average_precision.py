"""Mean average precision: how well scores rank the images of a class before all others."""

import numpy as np
from jaxtyping import Bool, Shaped


def by_class(
    scores: Shaped[np.ndarray, 'images classes'], labels: Bool[np.ndarray, 'images classes']
) -> Shaped[np.ndarray, ' classes']:
    """Average precision of every class in [0, 1], NaN for one that no image has.

    The sum over all thresholds of precision times the increase in recall, without interpolation
    (scikit-learn's average_precision_score). Images with equal scores share a threshold. Where a
    score is not a number the result is none.
    """
    return np.array([_one(score, label) for score, label in zip(scores.T, labels.T, strict=True)])


def mean(
    scores: Shaped[np.ndarray, 'images classes'], labels: Bool[np.ndarray, 'images classes']
) -> float:
    """The mean of `by_class` over the classes that occur, NaN if none does."""
    found = by_class(scores, labels)[labels.any(axis=0)]
    return float(found.mean()) if found.size else float('nan')


def _one(score, label):
    if not label.any() or np.isnan(score).any():
        return np.nan
    order = np.argsort(-score, kind='stable')
    score, right = score[order], np.cumsum(label[order])
    last = np.flatnonzero(np.append(np.diff(score) != 0, True))  # of each group of equal scores
    return np.sum(right[last] / (last + 1) * np.diff(right[last], prepend=0)) / right[-1]
