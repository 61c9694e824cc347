"""Subsets of a split: nested, exact, and equal in every run."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support.batches import COUNT, assert_equal, make, numbers
from tests.support.errors import refused
from vit_jax.data import sources, subsets
from vit_jax.scoring import fewshot

SIZES = ('1', '10%', '20', '50%', '52', '53')
COUNTS = (1, 5, 20, 26, 52, 53)
KINDS = (
    'directory',
    'tfrecord',
    pytest.param('array_record', marks=[pytest.mark.slow, pytest.mark.nightly]),
)


@pytest.fixture(params=KINDS)
def data(request, tmp_path):
    return make(request.param, tmp_path)


def names(source):
    return [source.name_of(index) for index in range(source.num_examples)]


def test_a_larger_subset_contains_every_smaller_one(data):
    """A subset is a function of its size and the split alone, not of the seed of a run."""
    whole = set(names(data.source()))
    smaller = set()
    for size, count in zip(SIZES, COUNTS, strict=True):
        data.subset = size
        source = data.source()
        names_of_subset = names(source)
        assert (source.num_examples, len(set(names_of_subset))) == (count, count)
        assert smaller <= set(names_of_subset) <= whole
        assert names(data.source()) == names_of_subset
        smaller = set(names_of_subset)
    assert smaller == whole


def test_a_subset_has_the_images_and_labels_of_its_examples(data):
    """This holds in evaluation, and in training from any step and with several processes."""
    data.subset = '20'
    source = data.source()
    evaluated = data.evaluated()
    shown = numbers(evaluated)
    assert len(set(shown)) == 20
    labels = np.concatenate([batch['label'][batch['mask']] for batch in evaluated])
    np.testing.assert_array_equal(labels, np.array(shown) % 2)
    if source.labels is not None:
        np.testing.assert_array_equal(source.labels, labels)
        assert names(source) == [
            f'{data.name}/train/{"ab"[int(n) % 2]}/{int(n):03}.png' for n in shown
        ]
    whole = data.batches(5)
    for epoch in range(2):
        assert sorted(numbers(whole)[20 * epoch : 20 * (epoch + 1)]) == sorted(shown)
    assert_equal(data.batches(2, start=3), whole[3:])
    halves = [numbers(data.batches(5, 0, process, 2)) for process in (0, 1)]
    assert sorted(sum(halves, [])) == sorted(shown * 2)


def test_each_sequential_file_contributes_in_proportion_to_its_length(tmp_path):
    data = make('tfrecord', tmp_path)
    pieces = data.source().pieces
    for count in range(1, COUNT + 1):
        data.subset = str(count)
        taken = dict(zip(data.source().pieces.filename, data.source().pieces.take, strict=True))
        for filename, length in zip(pieces.filename, pieces.take, strict=True):
            assert abs(taken.get(filename, 0) - length * count / COUNT) < 1


def test_the_permutation_never_changes():
    """Subsets of published runs can be reproduced by later versions."""
    source = subsets.subset(sources.open_source('digits', 'train'), '5', 'train')
    assert names(source) == [f'digit {index}' for index in (1310, 88, 95, 1201, 375)]
    counts = np.bincount(subsets.subset(sources.open_source('digits', 'train'), '50%', '').labels)
    assert (abs(counts - 72) < 20).all()
    train, test = fewshot.open_sources(
        dict(name='digits', data_dir='', eval_split='test', label='', stratify=True, heic=True),
        'train',
        '100',
    )
    assert (train.num_examples, test.num_examples) == (100, 360)


def test_unreadable_images_keep_their_places(tmp_path):
    data = make('directory', tmp_path)
    (tmp_path / 'train' / 'a' / '000.png').unlink()
    os.mkfifo(tmp_path / 'train' / 'a' / '000.png')
    for size in ('10', '53'):
        data.subset = size
        source = data.source()
        unreadable = [source.name_of(index) for index in source.unreadable]
        assert unreadable == [name for name in names(source) if name.endswith('000.png')]
    item = source.fetch(tf.constant([3], tf.int64))
    assert item['path'][0].numpy().decode() == source.name_of(3)


@pytest.mark.parametrize('size', ['54', '0%', '0.5%', '101%'])
def test_impossible_sizes_are_errors(size, tmp_path):
    data = make('directory', tmp_path)
    data.subset = size
    with refused('value', field='dataset.subset', value=size):
        data.source()
