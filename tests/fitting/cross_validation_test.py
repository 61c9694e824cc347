"""Folds of a probe: groups stay together, and the scores equal an independent computation."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from tests.support.errors import refused
from vit_jax.fitting import cross_validation

RNG = np.random.default_rng(0)


def test_folds_keep_groups_together_and_classes_within_one():
    labels = RNG.choice(3, 200, p=[0.6, 0.3, 0.1])
    targets = np.eye(3, dtype=bool)[labels]
    folds = cross_validation.cut(targets, np.arange(200), 5)
    for label in range(3):
        sizes = np.bincount(folds[labels == label], minlength=5)
        assert sizes.max() - sizes.min() <= 1
    groups = np.arange(200) // 4
    folds = cross_validation.cut(targets, groups, 5)
    assert all(len(set(folds[groups == group])) == 1 for group in range(50))
    assert set(folds) == set(range(5))


def test_scores_equal_numpy():
    targets = np.eye(4, dtype=bool)[RNG.integers(0, 4, 90)]
    probabilities = RNG.random((90, 4))
    folds = np.arange(90) % 3
    result = cross_validation.score(probabilities, targets, folds, multi_label=False)
    is_right = probabilities.argmax(axis=1) == targets.argmax(axis=1)
    accuracies = [is_right[folds == fold].mean() for fold in range(3)]
    np.testing.assert_allclose(result.accuracies, accuracies)
    assert result.mean == pytest.approx(np.mean(accuracies))
    assert result.standard_error == pytest.approx(np.std(accuracies, ddof=1) / np.sqrt(3))
    assert result.num_images == 90


def test_scores_of_several_labels_are_mean_average_precisions():
    targets = RNG.random((80, 3)) < 0.4
    probabilities = RNG.random((80, 3))
    folds = np.arange(80) % 2
    result = cross_validation.score(probabilities, targets, folds, multi_label=True)
    expected = [
        average_precision_score(targets[folds == fold], probabilities[folds == fold])
        for fold in range(2)
    ]
    np.testing.assert_allclose(result.accuracies, expected, rtol=1e-5)


def test_more_folds_than_groups_are_refused():
    with refused('value', field='--folds', value=3):
        cross_validation.cut(np.ones((6, 1), bool), np.array([0, 0, 0, 1, 1, 1]), 3)


@pytest.mark.parametrize('count', [-1, 1, 21])
def test_an_impossible_number_of_folds_is_refused(count):
    with refused('value', field='--folds', value=count):
        cross_validation.check_count(count)
    cross_validation.check_count(0)
