"""Temperature scaling finds what made a model too sure, and changes no prediction."""

import numpy as np
import pytest

from vit_jax.evaluators import temperature
from vit_jax.evaluators.calibration import calibration


def drawn(count=5000, classes=5):
    """Logits, and labels that are drawn from their softmax."""
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(count, classes))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = np.array([rng.choice(classes, p=row) for row in probabilities])
    return logits, labels


@pytest.mark.parametrize('factor', [0.3, 1.0, 4.0])
def test_the_factor_of_overconfident_logits_is_found(factor):
    logits, labels = drawn()
    assert temperature.fit(factor * logits, labels) == pytest.approx(factor, rel=0.05)


def test_the_factor_is_found_for_independent_classes():
    rng = np.random.default_rng(1)
    logits = 2 * rng.normal(size=(3000, 4))
    labels = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float64)
    assert temperature.fit(3 * logits, labels) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(('count', 'factor'), [(500, 3.0), (500, 0.2), (10, 3.0), (10, 0.2)])
def test_it_is_the_most_probable_value(count, factor):
    logits, labels = drawn(count)
    grid = np.exp(np.linspace(np.log(temperature.LOWEST), np.log(temperature.HIGHEST), 4001))
    values = [temperature.objective(value, factor * logits, labels) for value in grid]
    best = grid[np.argmin(values)]
    assert temperature.fit(factor * logits, labels) == pytest.approx(best, rel=2e-3)


def test_many_examples_decide_as_without_the_prior():
    logits, labels = drawn(500)
    best = temperature.fit(3 * logits, labels)
    at_best = temperature.cross_entropy(3 * logits / best, labels)
    for other in (0.98 * best, 1.02 * best):
        assert temperature.cross_entropy(3 * logits / other, labels) > at_best


def test_a_few_right_examples_do_not_make_a_model_certain():
    labels = np.arange(6) % 3
    logits = 2.0 * np.eye(3)[labels]
    assert 0.3 < temperature.fit(logits, labels) < 1


def test_the_cross_entropy_is_that_of_the_definition():
    logits, labels = drawn(50)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log(probabilities[np.arange(50), labels]).mean()
    assert temperature.cross_entropy(logits, labels) == pytest.approx(expected, rel=1e-12)


def test_calibrated_logits_have_a_small_calibration_error():
    logits, labels = drawn()
    logits *= 4

    def error(values):
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        probabilities = powers / powers.sum(axis=1, keepdims=True)
        right = probabilities.argmax(axis=1) == labels
        return calibration(probabilities.max(axis=1).astype(np.float32), right)['expected_error']

    assert error(logits) > 0.15
    assert error(logits / temperature.fit(logits, labels)) < 0.02
