import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from vit_jax.evaluators import average_precision


@pytest.mark.parametrize('decimals', [8, 1])  # with one, many images have equal scores
def test_equals_scikit_learn(decimals):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(200, 7)).round(decimals).astype(np.float32)
    labels = rng.random((200, 7)) < np.linspace(0.01, 0.9, 7)
    assert labels.any(axis=0).all()
    assert average_precision.mean(scores, labels) == pytest.approx(
        average_precision_score(labels, scores, average='macro'), rel=1e-12
    )
    np.testing.assert_allclose(
        average_precision.by_class(scores, labels),
        average_precision_score(labels, scores, average=None),
        rtol=1e-12,
    )


def test_by_hand():
    scores = np.array([[3.0], [2.0], [1.0]])
    assert average_precision.mean(scores, np.array([[1], [0], [1]], bool)) == (1 + 2 / 3) / 2


def test_a_class_without_images_does_not_count():
    labels = np.array([[1, 0], [0, 0]], bool)
    scores = np.array([[2.0, 1.0], [1.0, 2.0]])
    assert average_precision.mean(scores, labels) == 1
    assert np.isnan(average_precision.by_class(scores, labels)[1])
    assert np.isnan(average_precision.mean(scores, np.zeros((2, 2), bool)))


def test_nan_scores_give_nan():
    assert np.isnan(average_precision.mean(np.array([[np.nan], [1.0]]), np.array([[1], [0]], bool)))
