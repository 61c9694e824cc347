import numpy as np
import pytest

from vit_jax.evaluators.calibration import calibration


def test_by_hand():
    result = calibration(
        np.array([0.95, 0.99, 0.5, 0.52], np.float32), np.array([True, False, True, True])
    )
    assert [b['num_examples'] for b in result['bins']] == [2, 2]
    assert result['bins'][1] == pytest.approx(
        {'from': 14 / 15, 'to': 1, 'num_examples': 2, 'accuracy': 0.5, 'confidence': 0.97}
    )
    assert result['expected_error'] == pytest.approx((2 * 0.49 + 2 * 0.47) / 4)


def test_equals_a_sum_over_all_fifteen_bins():
    rng = np.random.default_rng(0)
    confidence = rng.random(500).astype(np.float32)
    right = rng.random(500) < confidence**2
    expected = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert calibration(confidence, right)['expected_error'] == pytest.approx(expected, rel=1e-5)


def test_confidence_of_zero_one_and_nan():
    result = calibration(np.array([0, 1], np.float32), np.array([False, True]))
    assert (result['expected_error'], len(result['bins'])) == (0, 2)
    assert calibration(np.array([np.nan], np.float32), np.array([True])) == {
        'expected_error': None,
        'bins': [],
    }
