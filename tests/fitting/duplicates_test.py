"""Near duplicates, copies and groups of photos."""

import numpy as np

from vit_jax.fitting import duplicates

RNG = np.random.default_rng(0)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def classes(count, size=12):
    """Features around one far centre for each class, and targets."""
    labels = np.arange(count) % 3
    centres = 6 * RNG.normal(size=(3, size))
    return centres[labels] + RNG.normal(size=(count, size)), np.eye(3, dtype=bool)[labels]


def test_near_pairs_are_those_of_every_pair_compared():
    features, targets = classes(60)
    features[31] = features[7] + 0.2 * RNG.normal(size=12)  # photos 7 and 31 are of one class
    labels = targets.argmax(axis=1)
    mean = features.mean(axis=0)
    means = np.stack([features[labels == k].mean(axis=0) for k in range(3)])
    expected = []
    for first in range(60):
        for second in range(first + 1, 60):
            overall = cosine(features[first] - mean, features[second] - mean)
            residuals = features[[first, second]] - means[labels[[first, second]]]
            is_near = overall >= duplicates.SIMILAR
            if labels[first] == labels[second]:
                is_near = min(overall, cosine(*residuals)) >= duplicates.SIMILAR_IN_CLASS
            if is_near:
                expected.append((first, second, overall))
    pairs = duplicates.near_pairs(features, targets)
    assert [pair[:2] for pair in pairs] == [pair[:2] for pair in expected]
    np.testing.assert_allclose([p[2] for p in pairs], [p[2] for p in expected], atol=1e-9)
    assert (7, 31) in [pair[:2] for pair in pairs]


def test_photos_of_one_class_are_no_duplicates():
    """Their features are alike: they have the class in common."""
    features, targets = classes(300, size=50)
    raw = np.array([cosine(features[0], features[k]) for k in range(3, 300, 3)])
    assert np.median(raw) > 0.9
    assert len(duplicates.near_pairs(features, targets)) < 0.001 * 300**2


def test_a_copy_with_another_label_is_found():
    features, targets = classes(60)
    features[9] = features[8] + 0.01
    assert (8, 9) in [pair[:2] for pair in duplicates.near_pairs(features, targets)]


def test_a_small_class_has_no_pairs_by_its_mean():
    """With two photos, the differences from their mean are opposite; with three, two are alike."""
    features, targets = classes(60)
    targets = np.concatenate([targets, np.zeros((60, 1), bool)], axis=1)
    small = [0, 1, 2]
    targets[small] = [False, False, False, True]
    features[2] = 2 * features[1] - features[0] + 6 * RNG.normal(size=12)
    pairs = duplicates.near_pairs(features, targets)
    assert not [pair for pair in pairs if pair[1] < 3]


def test_chains_of_pairs_are_one_group():
    groups = duplicates.groups_of_pairs(6, [(4, 2), (5, 4), (1, 0)])
    assert groups.tolist() == [0, 0, 2, 3, 2, 2]


def test_equal_files_and_named_groups():
    assert duplicates.equal_pairs(['a', 'b', 'a', 'a']) == [(0, 2), (0, 3)]
    assert duplicates.pairs_of_names(['', 'x', '', 'x']) == [(1, 3)]
