"""Mean average precision: how well scores rank the images of a class before all others."""

import numpy as np
from jaxtyping import Bool, Shaped


def by_class(
    scores: Shaped[np.ndarray, 'images classes'], labels: Bool[np.ndarray, 'images classes']
) -> Shaped[np.ndarray, ' classes']:
    """Average precision of every class, in [0, 1].

    Average precision is the sum over all thresholds of precision times the increase in recall,
    without interpolation, as in scikit-learn's average_precision_score. Images with equal scores
    share a threshold. The result is NaN for a class without images or with a NaN among its scores.
    """
    return np.array(
        [_of_class(score, label) for score, label in zip(scores.T, labels.T, strict=True)]
    )


def mean(
    scores: Shaped[np.ndarray, 'images classes'], labels: Bool[np.ndarray, 'images classes']
) -> float:
    """The mean of `by_class` over the classes that have images; NaN if no class has images."""
    precisions = by_class(scores, labels)[labels.any(axis=0)]
    return float(precisions.mean()) if precisions.size else float('nan')


def _of_class(score, label):
    if not label.any() or np.isnan(score).any():
        return np.nan
    order = np.argsort(-score, kind='stable')
    sorted_score = score[order]
    # Index of the last image in each group of equal scores.
    last = np.flatnonzero(np.append(np.diff(sorted_score) != 0, True))
    true_positives = np.cumsum(label[order])[last]
    precision = true_positives / (last + 1)
    new_positives = np.diff(true_positives, prepend=0)
    return np.sum(precision * new_positives) / label.sum()
