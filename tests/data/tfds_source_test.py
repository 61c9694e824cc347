"""TFDS sets: their formats, and errors about sets that cannot be read."""

import io

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.support.batches import Data, encoded, make, numbers, write_tfds_files
from tests.support.errors import refused
from vit_jax.data import sources


def open_refused(kind, name, data_dir, split='train', **expected):
    """The message of the error of a kind when a split is opened."""
    with refused(kind, **expected) as caught:
        sources.open_source(name, split, data_dir=str(data_dir))
    return str(caught.value)


def test_the_format_of_the_files_decides_how_a_set_is_read(tmp_path):
    for kind in ('tfrecord', 'array_record'):
        opened = make(kind, tmp_path / kind).source('train[10:20]')
        assert opened.num_examples == 10
        assert opened.class_names == ('a', 'b')
        assert (opened.pieces is None) == (kind == 'array_record')
        assert opened.name_of(0).endswith('00000-of-00005 record 10')
        assert opened.name_of(9).endswith('00001-of-00005 record 8')


def test_errors_list_splits_and_features(tmp_path):
    make('tfrecord', tmp_path)
    for split in ('test', 'train[:54]'):
        message = open_refused('unknown', 'small', tmp_path, split, value=split)
        assert 'its splits are: train (53 examples), or slices of them' in message
    message = open_refused('missing_data', 'smal', tmp_path, field='dataset.name', value='smal')
    assert 'Did you mean small' in message
    features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
    write_tfds_files(tmp_path, 'words', 'tfrecord', features, [[b'']])
    assert 'its features are: text (Text)' in open_refused('content', 'words', tmp_path)


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_an_empty_slice_is_an_error_unless_another_slice_has_examples(kind, tmp_path):
    make(kind, tmp_path)
    for split in ('train[:0]', 'train[50:10]'):
        open_refused('value', 'small', tmp_path, split, value=split)
    both = sources.open_source('small', 'train[50:10]+train[:7]', data_dir=str(tmp_path))
    assert both.num_examples == 7
    assert both.name_of(6).endswith(' record 6')


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_a_set_with_missing_or_damaged_files_is_an_error(kind, tmp_path):
    make(kind, tmp_path)
    first, last = sorted(tmp_path.rglob(f'*{kind}-0000*'))[::4]
    last.unlink()
    open_refused('missing_data', 'small', tmp_path, file=last, value=1)
    assert sources.open_source('small', 'train[:5]', data_dir=str(tmp_path)).num_examples == 5
    (first.parent / 'dataset_info.json').write_text('{')
    open_refused('missing_data', 'small', tmp_path, file=tmp_path, value='small')
    (first.parent / 'dataset_info.json').unlink()
    assert 'prepare it again' in open_refused('missing_data', 'small', tmp_path)


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_an_image_may_have_a_list_of_labels(kind, tmp_path):
    features = tfds.features.FeaturesDict(
        {
            'image': tfds.features.Image(shape=(None, None, 3)),
            'labels': tfds.features.Sequence(tfds.features.ClassLabel(names=['a', 'b', 'c'])),
        }
    )
    lists = [[0], [2, 0], [], [1, 2], [0, 1, 2]]
    shards = [
        [
            features.serialize_example({'image': io.BytesIO(encoded(i)), 'labels': labels})
            for i, labels in enumerate(lists)
        ]
    ]
    write_tfds_files(tmp_path, 'small', kind, features, shards, ('image', 'labels'))
    data = Data('small', str(tmp_path), batch_size=2)
    assert data.source().class_names == ('a', 'b', 'c')
    for batches in (data.batches(5), data.evaluated()):
        rows = np.concatenate([batch['label'][batch['mask']] for batch in batches])
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(
            rows, [[float(k in lists[int(n)]) for k in range(3)] for n in numbers(batches)]
        )
    assert len(rows) == 5


class Written(tfds.core.GeneratorBasedBuilder):
    """A set that has code, but no files on disk."""

    VERSION = tfds.core.Version('1.0.0')
    MANUAL_DOWNLOAD_INSTRUCTIONS = 'Get the archive\n  from the owner.'

    def _info(self):
        return tfds.core.DatasetInfo(builder=self)

    def _split_generators(self, dl_manager):
        return {}

    def _generate_examples(self):
        yield from ()


def test_errors_state_the_next_step(tmp_path):
    message = open_refused('missing_data', 'cifar01', tmp_path, field='dataset.name')
    assert 'Did you mean cifar10' in message
    assert str(tmp_path) in message
    message = open_refused('missing_data', 'mnist', tmp_path, value='mnist')
    assert f"data set 'mnist' is not prepared in '{tmp_path}/mnist/" in message
    assert f"tfds.builder('mnist', data_dir='{tmp_path}').download_and_prepare()" in message
    assert 'by hand' not in message
    message = open_refused('missing_data', 'written', tmp_path, value='written')
    assert 'downloads/manual' in message
    assert 'Get the archive from the owner.' in message


def test_a_configuration_of_a_set_is_not_mistaken_for_a_directory(tmp_path):
    message = open_refused('missing_data', 'imagenet2012_subset/1pct', tmp_path)
    assert "tfds.builder('imagenet2012_subset/1pct', data_dir=" in message
    assert 'by hand' in message
