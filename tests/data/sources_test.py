"""Sources: their examples and labels, and errors about bad input."""

import hashlib
import io
import os
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.errors import refused
from vit_jax.data import images, sources


def encoded(value, suffix='PNG'):
    buffer = io.BytesIO()
    Image.new('RGB', (4, 4), (value, value, value)).save(buffer, suffix)
    return buffer.getvalue()


def write_images(root, counts, suffix='png'):
    """Writes files root/CLASS/NUMBER.png; all pixels of a file equal its own number."""
    value = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f'{number}.{suffix}').write_bytes(encoded(value))
            value += 1


def all_items(source):
    """(pixels, label) of every example, in the order of the source."""
    items = source.fetch(tf.range(source.num_examples, dtype=tf.int64))
    result = []
    for i in range(source.num_examples):
        image, label = source.load({key: value[i] for key, value in items.items()})
        result.append((tf.io.decode_png(image, channels=3).numpy(), int(label)))
    return result


def open_refused(kind, name, split, class_names=None, **expected):
    """The message of the error of a kind when a split is opened."""
    with refused(kind, **expected) as caught:
        sources.open_source(name, split, class_names=class_names)
    return str(caught.value)


def test_digits_are_the_digits_of_sklearn_with_every_fifth_in_the_test_split():
    digits = load_digits()
    is_test = np.arange(1797) % 5 == 0
    for split, chosen, count in (('train', ~is_test, 1437), ('test', is_test, 360)):
        source = sources.open_source('digits', split)
        assert source.num_examples == count
        assert source.class_names == tuple('0123456789')
        images, labels = zip(*all_items(source), strict=True)
        np.testing.assert_array_equal(labels, digits.target[chosen])
        expected = np.round(digits.images[chosen] / 16 * 255)
        np.testing.assert_array_equal(np.stack(images), np.stack([expected] * 3, -1))


@pytest.mark.parametrize('cut', ['90%', '-10%', '33%', '100', '-100'])
def test_two_slices_are_the_whole_split_and_agree_with_tfds(cut):
    first, second = (sources.split_range(f'train[{s}]', 1437) for s in (f':{cut}', f'{cut}:'))
    assert (first[0], second[1]) == (0, 1437)
    assert first[1] == second[0]
    info = tfds.core.SplitInfo(name='train', shard_lengths=[1437], num_bytes=0)
    instruction = tfds.core.ReadInstruction.from_spec(f'train[:{cut}]')
    (absolute,) = instruction.to_absolute({'train': info})
    assert first[1] == absolute.to


@pytest.mark.parametrize(
    ('split', 'other', 'shared'),
    [
        ('train[:80%]', 'train[80%:]', False),
        ('train[:81%]', 'train[80%:]', True),
        ('train', 'train[99%:]', True),
        ('train', 'test', False),
        ('train[:8]', 'train[8:10]', False),
        ('train[-10:]', 'train[:90]', False),
        ('train[-10:]', 'train[:91]', True),
    ],
)
def test_shared_split_is_found_if_slices_overlap(split, other, shared):
    for pair in ((split, other), (other, split)):
        name = sources.shared_split(*pair, lambda name: SimpleNamespace(num_examples=100))
        assert name == ('train' if shared else None)


def test_directory_labels_are_positions_in_sorted_class_folders_including_empty_ones(tmp_path):
    write_images(tmp_path / 'train', {'b': 2, 'a': 3, 'empty': 0, '.hidden': 1})
    (tmp_path / 'train' / 'a' / 'UPPER.PNG').write_bytes(encoded(200))
    (tmp_path / 'train' / 'a' / 'notes.txt').write_text('not an image')
    source = sources.open_source(str(tmp_path), 'train')
    assert source.class_names == ('a', 'b', 'empty')
    assert source.num_examples == 6
    items = sorted((int(image[0, 0, 0]), label) for image, label in all_items(source))
    assert items == [(0, 1), (1, 1), (2, 0), (3, 0), (4, 0), (200, 0)]


def test_files_with_other_endings_are_logged_once(tmp_path, caplog):
    write_images(tmp_path / 'train', {'a': 1, 'b': 0, 'c': 0})
    for name in ('a/x.txt', 'b/0.psd', 'b/1.psd', 'b/.hidden'):
        (tmp_path / 'train' / name).write_text('')
    for split in ('train[:50%]', 'train[50%:]', 'train'):
        sources.DirectorySource(str(tmp_path), split)
    assert caplog.messages == [
        f"'{tmp_path}/train': only files {', '.join(images.SUFFIXES)} are read; skipped: "
        '2 .psd, 1 .txt. Class folder(s) without any image: b'
    ]


def names(source):
    return [source.name_of(index) for index in range(source.num_examples)]


CUTS = [
    ('train[:80%]', 'train[80%:]'),
    ('train[:80%]', 'train[80%:90%]', 'train[90%:]'),
    ('train[:90%]', 'train[90%:]'),
    ('train[:10%]', 'train[10%:]'),
    ('train[:30]', 'train[30:150]', 'train[150:]'),
]
# They include classes with one image and two images, and with more than half of all images.
SIZES = [
    {'a': 60, 'b': 60, 'c': 60},
    {'a': 100, 'b': 50, 'c': 10, 'd': 5, 'e': 2, 'f': 1},
    {f'class{number:02}': 8 + number for number in range(12)},
]


@pytest.mark.parametrize('sizes', SIZES)
@pytest.mark.parametrize('splits', CUTS)
def test_slices_of_a_directory_are_stratified(splits, sizes, tmp_path):
    write_images(tmp_path / 'train', sizes)
    whole = sources.open_source(str(tmp_path), 'train')
    parts = [sources.open_source(str(tmp_path), split) for split in splits]
    # Each image occurs once, in the order of the whole split.
    assert sum(map(names, parts), []) == names(whole)
    counts = np.stack([np.bincount(part.labels, minlength=len(sizes)) for part in parts])
    total = counts.sum(axis=0)
    np.testing.assert_array_equal(total, list(sizes.values()))
    for split, part, count in zip(splits, parts, counts, strict=True):
        first, last = sources.split_range(split, total.sum())
        assert part.num_examples == last - first
        share = total * part.num_examples / total.sum()
        large = total >= 10
        assert (abs(count - share)[large] <= 2).all(), (split, count, share)
    # Both sides of a cut have every class with two or more images, if they have enough images.
    for side in (parts[0], parts[-1]):
        if side.num_examples >= len(sizes):
            assert set(side.labels) >= set(np.flatnonzero(total > 1))


def test_a_held_out_tenth_has_one_image_of_each_class(tmp_path):
    """In a data set of monkeys, the order of names alone missed some classes."""
    sizes = {f'class{number:02}': 10 for number in range(17)}
    write_images(tmp_path / 'train', sizes)
    held_out = sources.open_source(str(tmp_path), 'train[90%:]')
    assert sorted(held_out.labels) == list(range(17))
    unstratified = sources.open_source(str(tmp_path), 'train[90%:]', stratify=False)
    assert len(set(unstratified.labels)) < 17


def test_single_labels_of_a_table_are_stratified(tmp_path):
    (tmp_path / 'train').mkdir()
    rows = ['file,label']
    for number in range(40):
        (tmp_path / 'train' / f'{number}.png').write_bytes(encoded(number))
        rows.append(f'{number}.png,{"rare" if number % 10 == 0 else "frequent"}')
    (tmp_path / 'train' / 'labels.csv').write_text('\n'.join(rows))
    for split, expected in (('train[:75%]', [27, 3]), ('train[75%:]', [9, 1])):
        source = sources.open_source(str(tmp_path), split)
        np.testing.assert_array_equal(np.bincount(source.labels), expected)


def test_a_new_file_moves_few_others_across_a_cut(tmp_path):
    sizes = {'a': 20, 'b': 31, 'c': 7}
    write_images(tmp_path / 'train', sizes)
    before = set(names(sources.open_source(str(tmp_path), 'train[90%:]')))
    for name in sizes:
        for number in range(5):
            path = tmp_path / 'train' / name / f'new{number}.png'
            path.write_bytes(encoded(255))
            after = set(names(sources.open_source(str(tmp_path), 'train[90%:]')))
            assert len(before ^ after - {str(path)}) <= 4
            path.unlink()


def test_without_stratification_the_order_is_that_of_earlier_versions(tmp_path):
    """The order follows the hash of CLASS/NAME, so runs of earlier versions can resume."""
    write_images(tmp_path / 'train', {'a': 20, 'b': 13, 'c': 2})
    paths = [os.path.relpath(path, tmp_path / 'train') for path in tmp_path.glob('train/*/*')]
    paths.sort(key=lambda path: hashlib.blake2b(path.encode()).digest())
    for split, expected in (('train', paths), ('train[:90%]', paths[:32])):
        source = sources.open_source(str(tmp_path), split, stratify=False)
        assert names(source) == [str(tmp_path / 'train' / path) for path in expected]
    assert names(sources.open_source(str(tmp_path), 'train')) != [
        str(tmp_path / 'train' / path) for path in paths
    ]
    # A new file does not move other files.
    (tmp_path / 'train' / 'a' / 'new.png').write_bytes(encoded(255))
    again = names(sources.open_source(str(tmp_path), 'train', stratify=False))
    assert [name for name in again if not name.endswith('new.png')] == [
        str(tmp_path / 'train' / path) for path in paths
    ]


def test_relative_directory_without_separator_is_a_directory(tmp_path, monkeypatch):
    write_images(tmp_path / 'mine' / 'train', {'a': 1})
    monkeypatch.chdir(tmp_path)
    assert sources.open_source('mine', 'train').num_examples == 1


def test_errors_of_a_directory_name_the_folder_and_the_split(tmp_path):
    root = str(tmp_path)
    nowhere = f'{root}/nowhere'
    message = open_refused('missing', nowhere, 'train', field='dataset.name', file=nowhere)
    assert message == (
        f"no directory '{nowhere}': expected dataset.name to be a directory with SPLIT/CLASS/image "
        "files, the name of a TFDS set, or 'digits'."
    )
    write_images(tmp_path / 'train', {'a': 0})
    write_images(tmp_path / 'val', {'a': 1})
    message = open_refused('unknown', root, 'test[:50%]', file=root, value='test')
    assert 'the folders there are: train, val.' in message
    open_refused('missing', root, 'train', file=tmp_path / 'train')
    open_refused('value', root, 'val[:10%]', value='val[:10%]')
    open_refused('value', root, 'val[10', value='val[10')
    (tmp_path / 'val' / 'stray.JPG').write_bytes(encoded(0))
    open_refused('content', root, 'val', file=tmp_path / 'val', value=['stray.JPG'])


def test_a_data_set_without_a_name_is_an_error():
    open_refused('missing', '', 'train', field='dataset.name')


def test_class_folders_of_evaluation_must_match_the_training_split(tmp_path):
    root = str(tmp_path)
    folder = tmp_path / 'val'
    write_images(tmp_path / 'train', {'a': 1, 'b': 1, 'c': 1})
    write_images(folder, {'b': 1, 'new': 1})
    names = sources.open_source(root, 'train').class_names
    message = open_refused('content', root, 'val', names, file=folder, value=['new'])
    assert 'the classes of the training split or the weights are: a, b, c.' in message
    os.rename(folder / 'new', folder / 'a')
    open_refused('missing', root, 'val', names, file=folder, value=['c'])
    (folder / 'c').mkdir()
    source = sources.open_source(root, 'val', class_names=names)
    assert source.class_names == ('a', 'b', 'c')
    assert sorted(label for _, label in all_items(source)) == [0, 1]


def test_an_unknown_split_of_the_digits_is_an_error():
    open_refused('unknown', 'digits', 'validation', value='validation')


def test_examples_of_classes_are_counted_if_labels_are_known(tmp_path):
    write_images(tmp_path / 'train', {'ant': 3, 'bee': 0, 'cat': 5, 'dog': 0})
    source = sources.open_source(str(tmp_path), 'train')
    with refused('missing', field='dataset.balance', value=['bee', 'dog']):
        sources.class_counts(source, 'dataset.balance')
    (tmp_path / 'train' / 'bee').rmdir()
    (tmp_path / 'train' / 'dog').rmdir()
    source = sources.open_source(str(tmp_path), 'train')
    np.testing.assert_array_equal(sources.class_counts(source, ''), [3, 5])
    source.labels = None  # as in a TFDS set
    with refused('inapplicable', field='loss.class_weights'):
        sources.class_counts(source, 'loss.class_weights')
    source.multi_label = True
    with refused('inapplicable', field='dataset.balance'):
        sources.class_counts(source, 'dataset.balance')
