"""Folds are disjoint, complete and stratified, and every source has them."""

import collections

import numpy as np
import pytest

from tests.support.batches import COUNT, make, numbers
from tests.support.datasets import write_images
from tests.support.errors import refused
from vit_jax.data import folds, photo_table, sources
from vit_jax.data.photo_table import Row

RNG = np.random.default_rng(0)
KINDS = (
    'digits',
    'directory',
    'tfrecord',
    pytest.param('array_record', marks=[pytest.mark.slow]),
)


def names(source):
    return [source.name_of(index) for index in range(source.num_examples)]


def opened(data, split, count):
    """The folds of a split and their rests."""
    numbers_of_folds = range(1, count + 1)
    held_out = [data.source(folds.held_out(split, k, count)) for k in numbers_of_folds]
    rests = [data.source(folds.rest(split, k, count)) for k in numbers_of_folds]
    return held_out, rests


@pytest.mark.parametrize('split', ['train', pytest.param('train[:50%]', marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', KINDS)
def test_every_example_is_in_one_fold_and_in_the_rest_of_the_others(kind, split, tmp_path):
    data = make(kind, tmp_path)
    whole = collections.Counter(listed(data, split))
    held_out, rests = opened(data, split, 4)
    sizes = [source.num_examples for source in held_out]
    assert max(sizes) - min(sizes) <= 1
    together = collections.Counter()
    for number, (fold, rest) in enumerate(zip(held_out, rests, strict=True), start=1):
        of_fold = collections.Counter(listed(data, folds.held_out(split, number, 4)))
        of_rest = collections.Counter(listed(data, folds.rest(split, number, 4)))
        assert of_fold + of_rest == whole
        assert (of_fold.total(), of_rest.total()) == (fold.num_examples, rest.num_examples)
        together += of_fold
    assert together == whole


def listed(data, split):
    """The pixels and labels of all images of a split, as the evaluation reads them."""
    images = []
    for batch in data.evaluated(split=split):
        for image, label in zip(
            batch['image'][batch['mask']], batch['label'][batch['mask']], strict=True
        ):
            images.append((image.tobytes(), int(label)))
    return images


@pytest.mark.parametrize('kind', ['directory', 'tfrecord'])
def test_training_shows_the_images_of_the_rest_only(kind, tmp_path):
    data = make(kind, tmp_path)
    rest = folds.rest('train', 2, 3)
    size = data.source(rest).num_examples
    steps = -(-3 * size // data.batch_size)
    shown = set(numbers(data.batches(steps, split=rest)))
    held_out = set(numbers(data.evaluated(split=folds.held_out('train', 2, 3))))
    assert len(shown) == size
    assert not shown & held_out
    assert len(shown | held_out) == COUNT


@pytest.mark.parametrize('count', [2, 3, 5, 20])
def test_folds_have_every_class_within_one(count):
    labels = RNG.choice(40, 500, p=RNG.dirichlet(np.full(40, 0.3)))
    fold_of_example = folds.by_class(labels, count)
    assert set(fold_of_example) == set(range(1, count + 1))
    for chosen in [np.full(500, True), *(labels == label for label in np.unique(labels))]:
        sizes = np.bincount(fold_of_example[chosen], minlength=count + 1)[1:]
        assert sizes.max() - sizes.min() <= 1


def test_folds_of_a_directory_have_every_class_within_one(tmp_path):
    write_images(tmp_path / 'train', ['rare'], 3)
    write_images(tmp_path / 'train', ['frequent'], 50)
    for number in range(1, 6):
        source = sources.open_source(str(tmp_path), f'train@fold={number}/5')
        frequent, rare = np.bincount(source.labels, minlength=2)
        assert frequent == 10
        assert rare in (0, 1)


def grouped_rows(root, multi_label):
    write_images(root, ['oak', 'rose'], 24)
    rows = []
    for name in ('oak', 'rose'):
        for number in range(24):
            group = f'plant {number // 3}' if number < 15 else ''
            labels = (name,)
            if multi_label and number % 2:
                labels = ('oak', 'rose')
            rows.append(Row(str(root / name / f'{number:03}.png'), labels, 'train', group))
    return rows


@pytest.mark.parametrize('multi_label', [False, True])
def test_groups_of_a_table_stay_in_one_fold(multi_label, tmp_path):
    rows = grouped_rows(tmp_path, multi_label)
    path = str(tmp_path / 'photos.csv')
    photo_table.write(path, rows, multi_label)
    folds_of_group = collections.defaultdict(set)
    fold_of_file = {}
    for number in range(1, 5):
        held_out = names(sources.open_source(path, f'train@fold={number}/4'))
        rest = names(sources.open_source(path, f'train@fold!={number}/4'))
        assert sorted(held_out + rest) == sorted(row.file for row in rows)
        assert 9 <= len(held_out) <= 15
        for file in held_out:
            assert fold_of_file.setdefault(file, number) == number
    for row in rows:
        if row.group:
            folds_of_group[row.group].add(fold_of_file[row.file])
    assert {len(numbers_of_folds) for numbers_of_folds in folds_of_group.values()} == {1}
    assert len(folds_of_group) == 5


def test_images_without_a_group_are_not_kept_together():
    targets = np.ones((12, 1), bool)
    fold_of_example = folds.by_group(targets, ['a', 'a', *[''] * 10], 4)
    assert fold_of_example[0] == fold_of_example[1]
    assert sorted(np.bincount(fold_of_example)[1:]) == [3, 3, 3, 3]


def test_the_listing_of_a_fold_has_its_own_images(tmp_path):
    """data.json records the listing, so that a run resumes on the same images only."""
    data = make('directory', tmp_path)
    source = data.source('train@fold=1/3')
    listing = [name for _, name, _ in source.listing()]
    assert [name.rpartition('/')[2] for name in listing] == [
        name.rpartition('/')[2] for name in names(source)
    ]


@pytest.mark.parametrize(
    ('split', 'other', 'is_shared'),
    [
        ('train@fold=1/5', 'train@fold!=1/5', False),
        ('train@fold=1/5', 'train@fold!=2/5', True),
        ('train@fold=1/5', 'train@fold=2/5', False),
        ('train@fold=1/5', 'train@fold=1/5', True),
        ('train@fold!=1/5', 'train@fold!=2/5', True),
        ('train@fold!=1/2', 'train@fold!=2/2', False),
        ('train@fold=1/5', 'train@fold=2/4', True),
        ('train@fold=1/5', 'train', True),
        ('train[:90%]@fold=1/5', 'train[90%:]', False),
        ('train[:90%]@fold=1/5', 'train[80%:]', True),
        ('train[:90%]@fold=1/5', 'train@fold!=1/5', True),
        ('train[:9]+test@fold=1/5', 'train[:9]+test@fold!=1/5', False),
        ('train[:9]+test@fold=1/5', 'test[:1]', True),
    ],
)
def test_folds_share_images_if_they_may(split, other, is_shared, tmp_path):
    data = make('directory', tmp_path)
    for pair in ((split, other), (other, split)):
        shared = sources.shared_split(*pair, lambda name: data.source('train'))
        assert (shared is not None) == is_shared


@pytest.mark.parametrize(
    'split', ['train@fold=0/5', 'train@fold=6/5', 'train@fold=1/1', 'train@fold1/5', '@fold=1/2']
)
def test_a_fold_that_cannot_be_read_is_refused(split):
    with refused('value', value=split):
        sources.open_source('digits', split)


@pytest.mark.parametrize('kind', ['directory', 'tfrecord'])
def test_more_folds_than_images_are_refused(kind, tmp_path):
    data = make(kind, tmp_path)
    with refused('value', value='train[:3]@fold=1/4'):
        data.source('train[:3]@fold=1/4')


def test_more_folds_than_groups_are_refused(tmp_path):
    rows = [row._replace(group='same') for row in grouped_rows(tmp_path, False)]
    path = str(tmp_path / 'photos.csv')
    photo_table.write(path, rows, False)
    with refused('value', value='train@fold=1/2'):
        sources.open_source(path, 'train@fold=1/2')


def test_folds_of_a_sum_of_tfds_slices(tmp_path):
    data = make('tfrecord', tmp_path)
    whole = set(names(data.source('train[:10]+train[40:]')))
    parts = [names(data.source(f'train[:10]+train[40:]@fold={k}/3')) for k in (1, 2, 3)]
    assert sum(map(len, parts)) == len(whole)
    assert set().union(*parts) == whole
