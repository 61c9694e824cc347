"""Near duplicates, copies and groups of photos."""

import numpy as np

from vit_jax.fitting import duplicates

RNG = np.random.default_rng(0)


def test_near_pairs_are_those_of_every_pair_compared():
    features = RNG.normal(size=(40, 3))
    features[7] = 2 * features[31] + 1e-3
    pairs = duplicates.near_pairs(features, 0.95)
    expected = []
    for first in range(40):
        for second in range(first + 1, 40):
            a, b = features[first], features[second]
            similarity = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            if similarity >= 0.95:
                expected.append((first, second))
    assert [pair[:2] for pair in pairs] == expected
    assert (7, 31) in expected


def test_chains_of_pairs_are_one_group():
    groups = duplicates.groups_of_pairs(6, [(4, 2), (5, 4), (1, 0)])
    assert groups.tolist() == [0, 0, 2, 3, 2, 2]


def test_equal_files_and_named_groups():
    assert duplicates.equal_pairs(['a', 'b', 'a', 'a']) == [(0, 2), (0, 3)]
    assert duplicates.pairs_of_names(['', 'x', '', 'x']) == [(1, 3)]
