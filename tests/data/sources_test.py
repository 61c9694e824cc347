"""Sources: which examples and labels they hold, and what they say about bad input."""

import io
import os

import ml_collections
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image
from sklearn.datasets import load_digits

from vit_jax.data import sources, tfds_source
from vit_jax.errors import UserError


def dataset(name, data_dir=''):
    return ml_collections.ConfigDict({'name': str(name), 'data_dir': str(data_dir)})


def encoded(value, suffix='PNG'):
    buffer = io.BytesIO()
    Image.new('RGB', (4, 4), (value, value, value)).save(buffer, suffix)
    return buffer.getvalue()


def write_images(root, counts, suffix='png'):
    """Files root/CLASS/NUMBER.png, all pixels of a file equal to a number of its own."""
    value = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f'{number}.{suffix}').write_bytes(encoded(value))
            value += 1


def all_items(source):
    """Label by grey value (or by whole image) of every example, in the order of the source."""
    items = source.fetch(tf.range(source.num_examples, dtype=tf.int64))
    result = []
    for i in range(source.num_examples):
        image, label = source.load({key: value[i] for key, value in items.items()})
        result.append((tf.io.decode_png(image, channels=3).numpy(), int(label)))
    return result


def message(call, *args):
    with pytest.raises(UserError) as error:
        call(*args)
    return str(error.value)


def test_digits_are_those_of_sklearn_split_by_every_fifth():
    digits = load_digits()
    held_out = np.arange(1797) % 5 == 0
    for split, chosen, count in (('train', ~held_out, 1437), ('test', held_out, 360)):
        source = sources.open_source(dataset('digits'), split)
        assert source.num_examples == count
        assert source.class_names == tuple('0123456789')
        images, labels = zip(*all_items(source), strict=True)
        np.testing.assert_array_equal(labels, digits.target[chosen])
        expected = np.round(digits.images[chosen] / 16 * 255)
        np.testing.assert_array_equal(np.stack(images), np.stack([expected] * 3, -1))


@pytest.mark.parametrize('cut', ['90%', '-10%', '33%', '100', '-100'])
def test_two_slices_make_the_whole_and_agree_with_tfds(cut):
    first, second = (sources.split_range(f'train[{s}]', 1437) for s in (f':{cut}', f'{cut}:'))
    assert (first[0], second[1]) == (0, 1437)
    assert first[1] == second[0]
    info = tfds.core.SplitInfo(name='train', shard_lengths=[1437], num_bytes=0)
    instruction = tfds.core.ReadInstruction.from_spec(f'train[:{cut}]')
    (absolute,) = instruction.to_absolute({'train': info})
    assert first[1] == absolute.to


def test_directory_labels_are_sorted_class_folders_also_the_empty_ones(tmp_path):
    write_images(tmp_path / 'train', {'b': 2, 'a': 3, 'empty': 0, '.hidden': 1})
    (tmp_path / 'train' / 'a' / 'UPPER.PNG').write_bytes(encoded(200))
    (tmp_path / 'train' / 'a' / 'notes.txt').write_text('not an image')
    source = sources.open_source(dataset(tmp_path), 'train')
    assert source.class_names == ('a', 'b', 'empty')
    assert source.num_examples == 6
    found = sorted((int(image[0, 0, 0]), label) for image, label in all_items(source))
    assert found == [(0, 1), (1, 1), (2, 0), (3, 0), (4, 0), (200, 0)]


def test_files_of_other_endings_are_named_once(tmp_path, caplog):
    write_images(tmp_path / 'train', {'a': 1, 'b': 0, 'c': 0})
    for name in ('a/x.txt', 'b/0.webp', 'b/1.webp', 'b/.hidden'):
        (tmp_path / 'train' / name).write_text('')
    for split in ('train[:50%]', 'train[50%:]', 'train'):
        sources.DirectorySource(str(tmp_path), split)
    assert caplog.messages == [
        f"'{tmp_path}/train': only files .jpg, .jpeg, .png, .gif, .bmp are read; left out: "
        '2 .webp, 1 .txt; and so class folder(s) without any image: b'
    ]


def test_directory_slices_hold_every_class_and_each_file_once(tmp_path):
    write_images(tmp_path / 'train', {'a': 60, 'b': 60, 'c': 60})
    parts = [sources.open_source(dataset(tmp_path), s) for s in ('train[:80%]', 'train[80%:]')]
    items = [all_items(part) for part in parts]
    assert [len(part) for part in items] == [144, 36]
    assert all({label for _, label in part} == {0, 1, 2} for part in items)
    assert sorted(int(i[0, 0, 0]) for part in items for i, _ in part) == list(range(180))


def test_a_new_file_moves_no_other(tmp_path):
    def values():
        source = sources.open_source(dataset(tmp_path), 'train')
        return [int(image[0, 0, 0]) for image, _ in all_items(source)]

    write_images(tmp_path / 'train', {'a': 20})
    before = values()
    (tmp_path / 'train' / 'a' / 'new.png').write_bytes(encoded(255))
    assert [value for value in values() if value != 255] == before


def test_relative_directory_without_separator_is_a_directory(tmp_path, monkeypatch):
    write_images(tmp_path / 'mine' / 'train', {'a': 1})
    monkeypatch.chdir(tmp_path)
    assert sources.open_source(dataset('mine'), 'train').num_examples == 1


def test_errors_of_a_directory_say_what_is_there(tmp_path):
    missing = message(sources.open_source, dataset(tmp_path / 'nowhere'), 'train')
    assert missing.startswith(f"no directory '{tmp_path}/nowhere'; dataset.name is a directory")
    write_images(tmp_path / 'train', {'a': 0})
    write_images(tmp_path / 'val', {'a': 1})
    assert 'the folders there are: train, val.' in message(
        sources.open_source, dataset(tmp_path), 'test[:50%]'
    )
    assert message(sources.open_source, dataset(tmp_path), 'train').startswith(
        f"no image in the 1 class folder(s) of '{tmp_path}/train'"
    )
    assert 'take a larger slice' in message(sources.open_source, dataset(tmp_path), 'val[:10%]')
    assert "write 'train'" in message(sources.open_source, dataset(tmp_path), 'val[10')
    (tmp_path / 'val' / 'stray.JPG').write_bytes(encoded(0))
    assert "1 image(s) outside of class folders, for example 'stray.JPG'" in message(
        sources.open_source, dataset(tmp_path), 'val'
    )


def test_data_set_without_a_name():
    assert 'add --config.dataset.name=DIRECTORY_OR_TFDS_NAME' in message(
        sources.open_source, dataset(''), 'train'
    )


def test_evaluation_folders_must_be_those_of_training(tmp_path):
    write_images(tmp_path / 'train', {'a': 1, 'b': 1, 'c': 1})
    write_images(tmp_path / 'val', {'b': 1, 'new': 1})
    names = sources.open_source(dataset(tmp_path), 'train').class_names
    error = message(sources.open_source, dataset(tmp_path), 'val', names)
    assert ('has class folder(s) of no known class: new; known, from the training split or the '
            'weights, are: a, b, c') in error
    os.rename(tmp_path / 'val' / 'new', tmp_path / 'val' / 'a')
    error = message(sources.open_source, dataset(tmp_path), 'val', names)
    assert 'no folder for class(es) c;' in error
    assert 'create an empty folder' in error
    (tmp_path / 'val' / 'c').mkdir()
    source = sources.open_source(dataset(tmp_path), 'val', names)
    assert source.class_names == ('a', 'b', 'c')
    assert sorted(label for _, label in all_items(source)) == [0, 1]


def test_digits_and_slices_say_what_they_know():
    assert "it has 'train' and 'test'" in message(
        sources.open_source, dataset('digits'), 'validation')


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


def test_tfds_errors_name_the_way_on(tmp_path):
    error = message(sources.open_source, dataset('cifar01', tmp_path), 'train')
    assert "no data set 'cifar01'" in error
    assert 'cifar10' in error
    assert str(tmp_path) in error
    error = message(sources.open_source, dataset('mnist', tmp_path), 'train')
    assert f'tfds build mnist --data_dir={tmp_path}\n' in error
    assert f"looked in '{tmp_path}/mnist/" in error
    assert 'by hand' not in error
    error = message(sources.open_source, dataset('written', tmp_path), 'train')
    assert 'downloads/manual' in error
    assert 'Get the archive from the owner.' in error


def test_tfds_configuration_is_no_directory(tmp_path):
    error = message(sources.open_source, dataset('imagenet2012_subset/1pct', tmp_path), 'train')
    assert 'tfds build imagenet2012_subset/1pct' in error
    assert 'by hand' in error


def test_share_of_processes_is_a_partition():
    take = np.array([5, 0, 7, 1], np.int64)
    skip = np.array([2, 0, 0, 3], np.int64)
    name = np.array(['a', 'b', 'c', 'd'], object)
    pieces = tfds_source.Pieces(name, skip, take, np.cumsum(take) - take)
    whole = records_of(pieces)
    for count in (1, 2, 3, 5, 20):
        shares = [records_of(pieces.share(p, count)) for p in range(count)]
        assert sum(shares, []) == whole
        lengths = {len(share) for share in shares}
        assert lengths <= {13 // count, -(-13 // count)}


def records_of(pieces):
    runs = zip(pieces.filename, pieces.skip, pieces.take, pieces.first, strict=True)
    return [(f, int(s + i), int(n + i)) for f, s, t, n in runs for i in range(t)]
