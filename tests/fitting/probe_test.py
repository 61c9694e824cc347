"""The linear probe is at its optimum."""

import numpy as np
import pytest

from tests.support.blobs import blobs
from vit_jax.fitting import probe


def test_the_gradient_at_the_head_is_zero():
    """Of the mean cross-entropy plus strength / 2 |W|^2 on standardised features."""
    features, targets = blobs()
    strength = 0.01
    head = probe.fit(features, targets, strength)
    std = features.std(axis=0) + 1e-5
    kernel = head.kernel * std[:, None]  # of standardised features
    x = (features - features.mean(axis=0)) / std
    residual = probe.probabilities(head.logits(features), False) - targets
    gradient = x.T @ residual / len(x) + strength * kernel
    assert np.abs(gradient).max() < 1e-4
    assert np.abs(residual.mean(axis=0)).max() < 1e-4


def test_two_classes_and_a_class_without_images():
    features, targets = blobs(classes=2)
    targets = np.concatenate([targets, np.zeros((len(targets), 1), bool)], axis=1)
    values = probe.probabilities(probe.fit(features, targets, 0.01).logits(features), False)
    assert (values.argmax(axis=1) == targets.argmax(axis=1)).mean() > 0.9
    assert values[:, 2].max() < 1e-3


def test_sigmoids_learn_each_class_alone():
    features, targets = blobs()
    targets[:, 1] |= targets[:, 0]
    head = probe.fit(features, targets, 0.01, multi_label=True)
    values = probe.probabilities(head.logits(features), True)
    assert ((values > 0.5) == targets).mean() > 0.95


def test_the_strength_has_the_lowest_loss_on_held_out_images():
    train, held_out = blobs(60, spread=3.0), blobs(400, spread=3.0)
    head, strength = probe.choose(train, held_out)

    def loss(head):
        values = probe.probabilities(head.logits(held_out[0]), False)
        return -np.log(values[held_out[1]]).mean()

    losses = {value: loss(probe.fit(*train, value)) for value in probe.STRENGTHS}
    assert strength == min(losses, key=losses.get)
    assert loss(head) == pytest.approx(losses[strength])
