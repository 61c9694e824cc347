"""Temperature scaling: one number that makes the confidence of a model match its accuracy.

Guo et al., "On Calibration of Modern Neural Networks", arXiv 1706.04599, section 4.2: the
probabilities of a model are softmax(z / T) of its logits z. T > 0 minimises the cross-entropy on
held-out examples. It changes no prediction.
"""

import numpy as np
from jaxtyping import Float, Int

LOWEST, HIGHEST = 0.05, 20.0
_STEPS = 60  # of golden-section search: each makes the interval 0.618 times as long
_GOLDEN = (5**0.5 - 1) / 2


def fit(
    logits: Float[np.ndarray, 'images classes'],
    labels: Int[np.ndarray, ' images'] | Float[np.ndarray, 'images classes'],
) -> float:
    """The temperature with the lowest cross-entropy, between LOWEST and HIGHEST.

    Args:
      logits: of held-out examples, which neither trained nor chose the model.
      labels: the class of each example for softmax; 0 or 1 for each class for sigmoid.

    The cross-entropy is convex in 1 / T, so that a search of one interval finds its minimum.
    """
    logits = np.asarray(logits, np.float64)
    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(_STEPS):
        left = high - _GOLDEN * (high - low)
        right = low + _GOLDEN * (high - low)
        if cross_entropy(logits * left, labels) < cross_entropy(logits * right, labels):
            high = right
        else:
            low = left
    return float(2 / (low + high))


def cross_entropy(
    logits: Float[np.ndarray, 'images classes'],
    labels: Int[np.ndarray, ' images'] | Float[np.ndarray, 'images classes'],
) -> float:
    """The mean cross-entropy of softmax, or of sigmoid where `labels` has a row of 0 and 1."""
    if labels.ndim == 2:
        # -y log s(z) - (1 - y) log(1 - s(z)) = log(1 + e^z) - y z
        return float(np.mean(np.logaddexp(0, logits) - labels * logits))
    largest = logits.max(axis=1, keepdims=True)
    log_sum = largest[:, 0] + np.log(np.exp(logits - largest).sum(axis=1))
    return float(np.mean(log_sum - logits[np.arange(len(labels)), labels]))
