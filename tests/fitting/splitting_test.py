"""Duplicates stay together, and every part has every class in proportion."""

import numpy as np
import pytest

from tests.support.errors import refused
from vit_jax.data.photo_table import Row
from vit_jax.fitting import duplicates, grouped_split, parts
from vit_jax.fitting.collect import Collection

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


@pytest.mark.parametrize('seed', range(3))
def test_a_cut_keeps_groups_together_and_classes_in_proportion(seed):
    labels = RNG.choice(4, 600, p=[0.55, 0.3, 0.1, 0.05])
    groups = np.arange(600)
    groups[:90] //= 3
    part = grouped_split.cut(np.eye(4, dtype=bool)[labels], groups, [0.8, 0.1, 0.1], seed=seed)
    for group in np.unique(groups):
        assert len(set(part[groups == group])) == 1
    for label in range(4):
        of_class = np.bincount(part[labels == label], minlength=3)
        share = np.array([0.8, 0.1, 0.1]) * of_class.sum()
        assert np.abs(of_class - share).max() <= 3


@pytest.mark.parametrize('count', [3, 4, 7])
def test_small_classes_have_an_image_in_every_part(count):
    targets = np.repeat(np.eye(5, dtype=bool), count, axis=0)
    part = grouped_split.cut(targets, np.arange(len(targets)), [0.8, 0.1, 0.1], at_least=1)
    for number in range(3):
        assert targets[part == number].sum(axis=0).min() >= 1


def test_a_cut_of_images_with_several_labels():
    targets = RNG.random((500, 6)) < 0.3
    part = grouped_split.cut(targets, np.arange(500), [0.8, 0.2])
    shares = targets[part == 1].sum(axis=0) / targets.sum(axis=0)
    assert np.abs(shares - 0.2).max() < 0.04


def collection(splits, labels=('a', 'b')):
    rows = [
        Row(f'/{split}{label}{k}.jpg', (label,), split)
        for split, count in splits.items()
        for label in labels
        for k in range(count)
    ]
    return Collection(rows, False, tuple(labels))


@pytest.mark.parametrize(
    ('splits', 'expected'),
    [
        ({'': 100}, {'train', 'val', 'test'}),
        ({'train': 100, 'test': 20}, {'train', 'val', 'test'}),
        ({'train': 100, 'val': 10, 'test': 20}, {'train', 'val', 'test'}),
    ],
)
def test_missing_splits_are_cut_from_train(splits, expected):
    photos = collection(splits)
    rows = parts.with_splits(photos, np.arange(len(photos.rows)))
    assert {row.split for row in rows} == expected
    assert [row.file for row in rows] == [row.file for row in photos.rows]
    for before, after in zip(photos.rows, rows, strict=True):
        assert before.split in ('', 'train', after.split)  # a split that is there stays


def test_too_few_photos_of_a_class_are_refused():
    photos = collection({'': 2})
    with refused('content', value=['a 2', 'b 2']):
        parts.with_splits(photos, np.arange(4))


def test_pairs_across_splits_are_found():
    rows = [Row(f'/{k}.jpg', ('a',), split) for k, split in enumerate(('train', 'train', 'test'))]
    across = parts.check_groups(rows, [(0, 1, 0.99), (1, 2, 0.98)])
    assert across == [('/1.jpg', '/2.jpg', 0.98)]
