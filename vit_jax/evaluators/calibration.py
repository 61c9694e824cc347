"""Calibration: the difference between the confidence and the accuracy of predictions."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

BINS = 15


def calibration(
    confidence: Float32[np.ndarray, ' images'], right: Bool[np.ndarray, ' images']
) -> dict[str, Any]:
    """Expected calibration error, and the reliability diagram behind it (arXiv 1706.04599).

    Args:
      confidence: the probability of the predicted class.
      right: whether the predicted class is a label of the image.

    Returns:
      `expected_error`, the mean over images of |accuracy - confidence| of their bin, and `bins`,
      from low to high. Each bin has its edges `from` and `to`, `num_examples`, `accuracy` and mean
      `confidence`. The bins have equal width, and bins without images are left out. If a confidence
      is NaN, the values are None and [].
    """
    if np.isnan(confidence).any():
        return {'expected_error': None, 'bins': []}
    number = np.clip(np.ceil(confidence.astype(np.float64) * BINS).astype(int) - 1, 0, BINS - 1)
    bins = []
    for k in np.unique(number).tolist():
        inside = number == k
        bins.append(
            {
                'from': k / BINS,
                'to': (k + 1) / BINS,
                'num_examples': int(inside.sum()),
                'accuracy': float(right[inside].mean()),
                'confidence': float(confidence[inside].mean(dtype=np.float64)),
            }
        )
    error = sum(b['num_examples'] * abs(b['accuracy'] - b['confidence']) for b in bins)
    return {'expected_error': error / len(confidence), 'bins': bins}
