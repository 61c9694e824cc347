"""The linear probe: its optimum, the model it makes, and the suspects it finds."""

import numpy as np
import pytest

from tests.support import small
from vit_jax import weights as weights_lib
from vit_jax.fitting import calibrated, outcome, probe, suspects
from vit_jax.fitting.extraction import logits_of

RNG = np.random.default_rng(0)


def blobs(count=300, classes=3, size=5, spread=1.0):
    """Features around one centre for each class, and targets."""
    labels = np.arange(count) % classes
    centres = 2 * np.random.default_rng(1).normal(size=(classes, size))
    features = centres[labels] + spread * RNG.normal(size=(count, size))
    return features, np.eye(classes, dtype=bool)[labels]


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


def test_weights_with_the_head_have_its_probabilities(tmp_path):
    given = small.make('vit')
    forward = weights_lib.predictor(given)
    batch = small.images(given, 8)
    features, _ = forward(batch)
    head = probe.Head(RNG.normal(size=(features.shape[1], 3)), RNG.normal(size=3))
    model = probe.with_head(given, head, ['a', 'b', 'c'], multi_label=False)
    model = calibrated.with_temperature(model, 2.5)
    path = str(tmp_path / 'model.safetensors')
    weights_lib.save(model, path, 'vit_jax')
    loaded = weights_lib.load(path)
    _, values = weights_lib.predictor(loaded)(batch)
    expected = probe.probabilities(head.logits(features) / 2.5, False)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    np.testing.assert_allclose(logits_of(loaded, features), head.logits(features) / 2.5, atol=1e-5)
    assert (list(loaded.classes), loaded.loss) == (['a', 'b', 'c'], 'softmax')


def test_changed_labels_are_the_first_suspects():
    features, targets = blobs(400, spread=0.7)
    changed = RNG.choice(400, 20, replace=False)
    labels = targets.argmax(axis=1)
    labels[changed] = (labels[changed] + 1) % 3
    targets = np.eye(3, dtype=bool)[labels]

    def classify(features, targets, queries):
        return probe.probabilities(probe.fit(features, targets, 0.01).logits(queries), False)

    values = suspects.out_of_fold(features, targets, np.arange(400) % 5, classify)
    ranked = suspects.ranked([str(k) for k in range(400)], targets, values, 'abc')
    first = {int(suspect.file) for suspect in ranked[:40]}
    assert len(first & set(changed.tolist())) >= 18


def test_no_model_scores_the_images_that_it_trained_on():
    seen = []

    def classify(features, targets, queries):
        seen.append((set(features[:, 0].tolist()), set(queries[:, 0].tolist())))
        return np.full((len(queries), 2), 0.5)

    features = np.arange(20.0)[:, None]
    suspects.out_of_fold(features, np.ones((20, 2), bool), np.arange(20) % 4, classify)
    assert len(seen) == 4
    for trained, scored in seen:
        assert not trained & scored
        assert trained | scored == set(range(20))


def test_an_outcome_counts_what_it_says():
    targets = np.eye(3, dtype=bool)[[0, 0, 1, 2, 2]]
    logits = np.log(
        np.array(
            [
                [0.8, 0.1, 0.1],
                [0.2, 0.7, 0.1],
                [0.1, 0.8, 0.1],
                [0.05, 0.05, 0.9],
                [0.9, 0.05, 0.05],
            ]
        )
    )
    found = outcome.score(list('abcde'), targets, logits, ['x', 'y', 'z'], False)
    assert found.accuracy == pytest.approx(0.6)
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert [(m.file, m.label, m.predicted) for m in found.mistakes] == [
        ('e', 'z', 'x'),
        ('b', 'x', 'y'),
    ]
    assert found.classes[-1] == ('y', 1.0, 1)
