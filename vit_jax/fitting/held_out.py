"""Predictions of photos by linear probes that have not seen them.

They rank the suspects, and with folds they cross-validate the probe.
"""

import numpy as np
from jaxtyping import Float, Int

from vit_jax.data import grouped_split
from vit_jax.fitting import cross_validation, probe, suspects
from vit_jax.fitting.collect import TEST, TRAIN, VALIDATION
from vit_jax.fitting.preparation import Data
from vit_jax.fitting.record import Record


def _classifier(data, strength):
    """A function (features, targets, queries) -> probabilities of the queries, by a new probe."""

    def classify(features, targets, queries):
        head = probe.fit(features, targets, strength, data.multi_label, data.balanced)
        return probe.probabilities(head.logits(queries), data.multi_label)

    return classify


def probabilities(
    record: Record, data: Data, num_folds: int
) -> Float[np.ndarray, 'images classes']:
    """Probabilities of all photos with features by probes that have not seen them.

    Args:
      record: of the fit, which gets the result of a cross-validation.
      data: the photos.
      num_folds: folds of the cross-validation of the probe; 0 for none.
    """
    if num_folds:
        return _cross_validated(record, data, num_folds)
    return _out_of_fold(data)


def _out_of_fold(data):
    """Probabilities of all photos with features by probes that have not seen them."""
    known = np.flatnonzero(np.isfinite(data.features[:, 0]))
    targets = data.targets[known]
    shares = [1 / suspects.FOLDS] * suspects.FOLDS
    folds = grouped_split.cut(targets, data.groups[known], shares)
    classify = _classifier(data, probe.STRENGTH)
    values = np.zeros(data.targets.shape)
    values[known] = suspects.out_of_fold(data.features[known], targets, folds, classify)
    return values


def cut_into_folds(
    data: Data, num_folds: int
) -> tuple[Int[np.ndarray, ' images'], Int[np.ndarray, ' images']]:
    """The indices of the photos of train and val with features, and the fold of each."""
    inside = np.sort(np.concatenate([data.part(split, True) for split in (TRAIN, VALIDATION)]))
    folds = cross_validation.cut(data.targets[inside], data.groups[inside], num_folds)
    return inside, folds


def _cross_validated(record, data, num_folds):
    """Cross-validate the probe on train and val.

    The penalty is the choice of the probe of the fit. A probe of all of train and val
    predicts the photos of test.

    Returns:
      Probabilities of all photos with features by probes that have not seen them.
    """
    classify = _classifier(data, record['probe']['strength'])
    inside, folds = cut_into_folds(data, num_folds)
    features = data.features[inside]
    targets = data.targets[inside]
    values = np.zeros(data.targets.shape)
    values[inside] = suspects.out_of_fold(features, targets, folds, classify)
    test = data.part(TEST, True)
    values[test] = classify(features, targets, data.features[test])
    result = cross_validation.score(values[inside], targets, folds, data.multi_label)
    cross_validation.report(result)
    record.write('cross_validation', result._asdict())
    return values
