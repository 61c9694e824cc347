"""Photos with a changed label are suspects, by models that have not seen them."""

import numpy as np

from tests.support.blobs import RNG, blobs
from vit_jax.fitting import probe, suspects


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
