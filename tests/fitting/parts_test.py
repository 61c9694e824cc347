"""Which photos train, which choose, and which test."""

import numpy as np
import pytest

from tests.support.errors import refused
from vit_jax.data.photo_table import Row
from vit_jax.fitting import parts
from vit_jax.fitting.collect import Collection


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
