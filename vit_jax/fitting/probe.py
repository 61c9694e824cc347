"""A linear classifier of frozen features, and the model that it makes of pre-trained weights.

It takes seconds where fine-tuning takes minutes, so that there is a model from the first minute on.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from vit_jax.evaluators import temperature
from vit_jax.weights import Weights

# Strengths of the L2 penalty that are tried, per image and on features of standard deviation 1.
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)
STRENGTH = 1e-2  # without held-out photos to choose it
FILE = 'probe.safetensors'  # the probe as a model, in the folder of a fit
LAYOUT = 'vit_jax'  # of the models that a fit writes
_STD_EPSILON = 1e-5
_MOST_STEPS = 300
_UNSEEN = -20.0  # the logit of a class without training images


class Head(NamedTuple):
    """logits = features @ kernel + bias."""

    kernel: Float[np.ndarray, 'features classes']
    bias: Float[np.ndarray, ' classes']

    def logits(self, features: Float[np.ndarray, 'images features']) -> np.ndarray:
        """The logits [images, classes] of features."""
        return features @ self.kernel + self.bias


def fit(
    features: Float[np.ndarray, 'images features'],
    targets: Bool[np.ndarray, 'images classes'],
    strength: float,
    multi_label: bool = False,
    balanced: bool = False,
) -> Head:
    """The head with the lowest cross-entropy plus strength / 2 |W|^2, on standardised features.

    Args:
      features: frozen features.
      targets: whether an image shows a class: exactly one of them unless `multi_label`.
      strength: of the penalty.
      multi_label: fit one sigmoid for each class, and not a softmax over the classes.
      balanced: weigh the images so that all classes count the same.
    """
    from sklearn.linear_model import LogisticRegression  # imports for a second

    mean = features.mean(axis=0)
    std = features.std(axis=0) + _STD_EPSILON
    x = (features - mean) / std
    regression = LogisticRegression(
        C=1 / (strength * len(x)),
        max_iter=_MOST_STEPS,
        class_weight='balanced' if balanced else None,
    )
    fit_classes = _fit_sigmoids if multi_label else _fit_softmax
    with warnings.catch_warnings():  # a fit that has not converged is close enough
        warnings.simplefilter('ignore')
        kernel, bias = fit_classes(regression, x, targets)
    kernel = kernel / std[:, None]
    return Head(kernel, bias - mean @ kernel)


def _fit_softmax(regression, x, targets):
    num_classes = targets.shape[1]
    kernel = np.zeros((x.shape[1], num_classes))
    bias = np.full(num_classes, _UNSEEN)
    labels = targets.argmax(axis=1)
    seen = np.unique(labels)
    if len(seen) == 1:
        bias[seen] = 0.0
        return kernel, bias
    regression.fit(x, labels)
    weights, intercept = regression.coef_, regression.intercept_
    if len(seen) == 2:  # scikit-learn then gives the logit of the second class alone
        weights = np.concatenate([-weights / 2, weights / 2])
        intercept = np.concatenate([-intercept / 2, intercept / 2])
    kernel[:, seen] = weights.T
    bias[seen] = intercept
    return kernel, bias


def _fit_sigmoids(regression, x, targets):
    num_classes = targets.shape[1]
    kernel = np.zeros((x.shape[1], num_classes))
    bias = np.full(num_classes, _UNSEEN)
    for k in range(num_classes):
        if targets[:, k].all():
            bias[k] = -_UNSEEN
        elif targets[:, k].any():
            regression.fit(x, targets[:, k])
            kernel[:, k] = regression.coef_[0]
            bias[k] = regression.intercept_[0]
    return kernel, bias


def choose(
    train: tuple[np.ndarray, np.ndarray],
    held_out: tuple[np.ndarray, np.ndarray],
    multi_label: bool = False,
    balanced: bool = False,
    strengths: Sequence[float] = STRENGTHS,
) -> tuple[Head, float]:
    """The head of the strength with the lowest cross-entropy on held-out images.

    Args:
      train, held_out: features and targets, as `fit` takes them.

    Returns:
      The head, and its strength. Ties go to the larger strength.
    """
    best = None
    for strength in sorted(strengths, reverse=True):
        head = fit(*train, strength, multi_label, balanced)
        labels = held_out[1].astype(np.float64) if multi_label else held_out[1].argmax(axis=1)
        loss = temperature.cross_entropy(head.logits(held_out[0]), labels)
        if best is None or loss < best[0]:
            best = loss, head, strength
    assert best is not None  # there are strengths
    return best[1], best[2]


def accuracy(
    logits: Float[np.ndarray, 'images classes'],
    targets: Bool[np.ndarray, 'images classes'],
    multi_label: bool,
) -> float:
    """The accuracy of logits or probabilities, from 0 to 1.

    It is the mean average precision of the classes where images have several labels.
    """
    if multi_label:
        from vit_jax.evaluators import average_precision

        return float(np.nanmean(average_precision.by_class(logits.astype(np.float32), targets)))
    return float((logits.argmax(axis=1) == targets.argmax(axis=1)).mean())


def probabilities(logits: Float[np.ndarray, 'images classes'], multi_label: bool) -> np.ndarray:
    """Softmax over the classes, or a sigmoid of each class where images have several labels."""
    if multi_label:
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def with_head(
    weights: Weights, head: Head, class_names: Sequence[str], multi_label: bool
) -> Weights:
    """The pre-trained weights with this head in place of their own.

    The model takes the same images and names the classes of the head.
    """
    arrays = {
        'kernel': head.kernel.astype(np.float32),
        'bias': head.bias.astype(np.float32),
    }
    return dataclasses.replace(
        weights,
        params={**weights.params, 'head': arrays},
        num_classes=len(class_names),
        classes=list(class_names),
        loss='sigmoid' if multi_label else 'softmax',
    )
