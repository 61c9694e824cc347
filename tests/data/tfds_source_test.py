"""TFDS sets: what is said about those that cannot be read."""

import io

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.support.batches import Data, encoded, make, numbers, write_tfds_files
from vit_jax.data import sources
from vit_jax.errors import UserError


def message(name, data_dir, split='train'):
    with pytest.raises(UserError) as error:
        sources.open_source(name, split, data_dir=str(data_dir))
    return str(error.value)


def test_the_files_decide_how_a_set_is_read(tmp_path):
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
        assert (
            f"no split '{split}' in 'small/1.0.0'; its splits are: train (53 examples), or "
            in message('small', tmp_path, split)
        )
    assert 'Did you mean small' in message('smal', tmp_path)
    features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
    write_tfds_files(tmp_path, 'words', 'tfrecord', features, [[b'']])
    assert 'its features are: text (Text)' in message('words', tmp_path)


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_an_empty_slice(kind, tmp_path):
    make(kind, tmp_path)
    for split in ('train[:0]', 'train[50:10]'):
        assert f"'{split}' of 'small' has no examples" in message('small', tmp_path, split)
    both = sources.open_source('small', 'train[50:10]+train[:7]', data_dir=str(tmp_path))
    assert both.num_examples == 7
    assert both.name_of(6).endswith(' record 6')


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_a_set_without_one_of_its_files(kind, tmp_path):
    make(kind, tmp_path)
    first, last = sorted(tmp_path.rglob(f'*{kind}-0000*'))[::4]
    last.unlink()
    assert f"'small/1.0.0' lacks 1 of 5 files, the first of them {last}: copy it again" in message(
        'small', tmp_path
    )
    assert sources.open_source('small', 'train[:5]', data_dir=str(tmp_path)).num_examples == 5
    (first.parent / 'dataset_info.json').write_text('{')
    assert f"TFDS cannot open 'small' in '{tmp_path}': " in message('small', tmp_path)
    (first.parent / 'dataset_info.json').unlink()
    assert 'prepare it again' in message('small', tmp_path)


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_a_list_of_labels_for_an_image(kind, tmp_path):
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
    for found in (data.batches(5), data.evaluated()):
        rows = np.concatenate([batch['label'][batch['mask']] for batch in found])
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(
            rows, [[float(k in lists[int(n)]) for k in range(3)] for n in numbers(found)]
        )
    assert len(rows) == 5


class Written(tfds.core.GeneratorBasedBuilder):
    """Stands for a set with code of which nothing is on disk."""

    VERSION = tfds.core.Version('1.0.0')
    MANUAL_DOWNLOAD_INSTRUCTIONS = 'Get the archive\n  from the owner.'

    def _info(self):
        return tfds.core.DatasetInfo(builder=self)

    def _split_generators(self, dl_manager):
        return {}

    def _generate_examples(self):
        yield from ()


def test_errors_name_the_way_on(tmp_path):
    error = message('cifar01', tmp_path)
    assert "dataset.name is 'cifar01': TFDS knows no data set of that name" in error
    assert 'Did you mean cifar10' in error
    assert str(tmp_path) in error
    error = message('mnist', tmp_path)
    assert f"tfds.builder('mnist', data_dir='{tmp_path}').download_and_prepare()" in error
    assert f"looked in '{tmp_path}/mnist/" in error
    assert 'by hand' not in error
    error = message('written', tmp_path)
    assert 'downloads/manual' in error
    assert 'Get the archive from the owner.' in error


def test_a_configuration_of_a_set_is_not_taken_for_a_directory(tmp_path):
    error = message('imagenet2012_subset/1pct', tmp_path)
    assert "tfds.builder('imagenet2012_subset/1pct', data_dir=" in error
    assert 'by hand' in error
