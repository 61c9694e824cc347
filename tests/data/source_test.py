"""The wrapper of sources."""

import numpy as np

from tests.support.batches import make
from vit_jax.data import sources, subsets
from vit_jax.data.broken import SourceWithBroken
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.source import WrappedSource, has_local_files

ATTRIBUTES = (
    'num_examples',
    'class_names',
    'multi_label',
    'pieces',
    'labels',
    'label_lists',
    'stratified',
    'unreadable',
)


def test_a_wrapped_source_forwards_to_its_source():
    source = sources.open_source('digits', 'test')
    wrapped = WrappedSource(source)
    for name in ATTRIBUTES:
        assert getattr(wrapped, name) is getattr(source, name)
    indices = tf.constant([3, 1], tf.int64)
    for name, column in source.fetch(indices).items():
        np.testing.assert_array_equal(wrapped.fetch(indices)[name], column)
    item = {name: column[0] for name, column in source.fetch(indices).items()}
    assert wrapped.load(item)[1] == source.load(item)[1]
    assert wrapped.name_of(3) == source.name_of(3)
    assert wrapped.restore(3) is False
    assert list(wrapped.listing()) == list(source.listing())


def test_wrapping_does_not_change_the_source():
    source = sources.open_source('digits', 'test')
    before = {name: getattr(source, name) for name in ATTRIBUTES}
    broken = SourceWithBroken(source, {3: 'cut short'})
    subset = subsets.subset(broken, '10', 'test')
    for name, value in before.items():
        assert getattr(source, name) is value
    assert source.unreadable == {}
    assert subset.num_examples == 10
    assert len(subset.labels) == 10


def test_wrapped_sources_can_be_wrapped():
    source = sources.open_source('digits', 'test')
    whole = subsets.Subset(source, np.array([5, 7, 9]), None)
    part = subsets.Subset(SourceWithBroken(whole, {1: 'cut short'}), np.array([1, 2]), None)
    assert part.name_of(0) == source.name_of(7)
    assert part.unreadable == {0: 'cut short'}
    assert part.labels.tolist() == source.labels[[7, 9]].tolist()


def test_only_directories_have_local_files(tmp_path):
    assert has_local_files(make('directory', tmp_path / 'a').source())
    assert not has_local_files(make('tfrecord', tmp_path / 'b').source())
    assert not has_local_files(sources.open_source('digits', 'test'))
