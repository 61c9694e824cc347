"""Images with several labels: from labels.csv, in batches, and what is said about wrong rows."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support.batches import COUNT, Data, assert_equal, encoded, numbers
from vit_jax.data import label_lists, sources
from vit_jax.errors import UserError

NAMES = ('ant', 'bee', 'cat', 'dog')


def labels_of(number):
    """Of the image that holds a number: one to four names."""
    return [name for k, name in enumerate(NAMES) if number >> k & 1 or k == number % 4]


def write(folder, count=COUNT, names=labels_of, header=''):
    """Images NNN.png and their labels.csv; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f'{number:03}.png').write_bytes(encoded(number))
    rows = ''.join(f'{number:03}.png,{";".join(names(number))}\n' for number in range(count))
    (folder / 'labels.csv').write_text(header + rows)
    return folder / 'labels.csv'


@pytest.fixture
def data(tmp_path):
    write(tmp_path / 'train')
    return Data(str(tmp_path))


def targets(found):
    """What the labels of batches must be, by the numbers in their images."""
    return [[float(name in labels_of(int(n))) for name in NAMES] for n in numbers(found)]


def message(root, split='train', class_names=None):
    with pytest.raises(UserError) as error:
        sources.open_source(str(root), split, class_names=class_names)
    return str(error.value)


def test_lists_of_any_length_become_targets():
    packed = label_lists.pack([[2], [], [0, 3]])
    found = [label_lists.multi_hot(label_lists.unpack(x), 4).numpy().tolist() for x in packed]
    assert found == [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]


def test_batches_have_targets_of_their_images_and_begin_anywhere(data):
    whole = data.batches(24)
    assert data.source().class_names == NAMES
    assert whole[0]['label'].dtype == np.float32
    assert whole[0]['label'].shape == (data.batch_size, 4)
    np.testing.assert_array_equal(np.concatenate([b['label'] for b in whole]), targets(whole))
    assert_equal(data.batches(4, 20), whole[20:])
    seen = numbers(whole)
    assert sorted(seen[:COUNT]) == list(range(COUNT))


def test_processes_together_see_what_one_sees(data):
    parts = [data.batches(9, process=k, processes=2) for k in range(2)]
    joined = [
        {key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*parts, strict=True)
    ]
    assert_equal(joined, data.batches(9))


@pytest.mark.slow
def test_broken_images_are_replaced_in_training_and_left_out_in_evaluation(data, tmp_path):
    for number in (3, 20):
        (tmp_path / 'train' / f'{number:03}.png').write_bytes(b'no image')
    found = data.batches(8)
    np.testing.assert_array_equal(np.concatenate([b['label'] for b in found]), targets(found))
    assert_equal(data.batches(8), found)
    evaluated = data.evaluated()
    assert sorted(numbers(evaluated)) == sorted({*range(COUNT)} - {3, 20})
    for batch in evaluated:
        assert not batch['label'][~batch['mask']].any()
    np.testing.assert_array_equal(
        np.concatenate([b['label'][b['mask']] for b in evaluated]), targets(evaluated)
    )


def test_classes_come_from_the_file_the_training_split_or_the_names(tmp_path):
    write(tmp_path / 'train', 4)
    write(tmp_path / 'test', 2, lambda number: ['cat'])
    assert sources.open_source(str(tmp_path), 'test').class_names == ('cat',)
    assert sources.open_source(str(tmp_path), 'test', class_names=NAMES).class_names == NAMES
    (tmp_path / 'classes.txt').write_text('dog\ncat\nbee\nant\nelk\n')
    source = sources.open_source(str(tmp_path), 'test')
    assert source.class_names == ('dog', 'cat', 'bee', 'ant', 'elk')
    item = source.fetch(tf.constant([0], tf.int64))
    assert source.load({key: x[0] for key, x in item.items()})[1].numpy().tolist() == [
        0,
        1,
        0,
        0,
        0,
    ]


def test_a_spreadsheet_writes_a_mark_a_header_and_other_ends_of_lines(tmp_path):
    path = write(tmp_path / 'train', 5, header='file,labels\n')
    path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes().replace(b'\n', b'\r\n'))
    assert sources.open_source(str(tmp_path), 'train').num_examples == 5


def test_a_header_of_one_label_makes_classes_as_folders_do(tmp_path):
    def one(number):
        return [NAMES[number % 3]]

    write(tmp_path / 'train', 6, one, header='file,label\n')
    source = sources.open_source(str(tmp_path), 'train[:5]', class_names=NAMES)
    assert (source.multi_label, source.class_names) == (False, NAMES)
    for number in range(6):
        folder = tmp_path / 'folders' / 'train' / one(number)[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{number:03}.png').write_bytes(encoded(number))
    for root in (tmp_path, tmp_path / 'folders'):
        data = Data(str(root))
        assert data.source().class_names == NAMES[:3]
        batch = data.batches(1)[0]
        assert batch['label'].dtype == np.int32
        assert batch['label'].tolist() == [int(number) % 3 for number in numbers([batch])]


def test_a_table_beside_folders_of_classes_changes_nothing(tmp_path):
    (tmp_path / 'train' / 'ant').mkdir(parents=True)
    (tmp_path / 'train' / 'ant' / '0.png').write_bytes(encoded(0))
    (tmp_path / 'train' / 'labels.csv').write_text('0.png,bee\n')
    source = sources.open_source(str(tmp_path), 'train')
    assert (source.multi_label, source.class_names) == (False, ('ant',))


@pytest.mark.parametrize(
    ('row', 'expected'),
    [
        (
            'gone.png,ant\nalso-gone.png,bee',
            "Correct or remove these rows:\n  line 4 names 'gone.png'\n"
            "  line 5 names 'also-gone.png'",
        ),
        ('filename,label', 'and in a header file,labels or file,label'),
        ('000.png,ant', "line 4 names '000.png' again"),
        ('003.png,', "line 4 has an empty label for '003.png': expected one name or more"),
        ('003.png,ant;;bee', "line 4 has an empty label for '003.png'"),
        ('003.png;ant', 'line 4 has 1 column(s): expected FILE,LABEL;LABEL'),
        ('003.png,ant,bee', 'line 4 has 3 column(s)'),
        ('', 'has no row for 1 image(s) beside it: 003.png. Add rows FILE,LABEL;LABEL'),
        ('003.png,"ant', 'line 4'),
        (
            '003.png,yak',
            'labels of unknown classes: yak; those of the training split or the weights '
            'are: ant, bee, cat, dog',
        ),
    ],
)
def test_wrong_rows(row, expected, tmp_path):
    path = write(tmp_path / 'train', 3)
    (tmp_path / 'train' / '003.png').write_bytes(encoded(3))
    path.write_text(path.read_text() + row + '\n')
    assert expected in message(tmp_path, class_names=NAMES)


def test_wrong_files(tmp_path):
    path = write(tmp_path / 'train', 3)
    (tmp_path / 'classes.txt').write_text('ant\nbee')
    assert f'those of {tmp_path}/classes.txt are: ant, bee.' in message(tmp_path)
    (tmp_path / 'classes.txt').write_text('ant\nbee\ncat\nant')
    assert f'{tmp_path}/classes.txt names a class twice' in message(tmp_path)
    os.remove(tmp_path / 'classes.txt')
    (tmp_path / 'train' / 'more').mkdir()
    (tmp_path / 'train' / 'more' / '0.png').write_bytes(encoded(0))
    assert 'has labels.csv and folders with images: more.' in message(tmp_path)
    path.write_bytes(b'000.png,\xff')
    assert f'{path} cannot be read' in message(tmp_path)
    path.write_text('file,label\n000.png,ant\n001.png,bee;cat\n002.png,cat\n')
    assert "line 3 has 2 labels for '001.png', and the header is file,label" in message(tmp_path)
    os.remove(path)
    os.mkfifo(path)
    assert f'{path} is not a regular file' in message(tmp_path)


@pytest.mark.parametrize('with_classes', [False, True])
def test_cells_that_were_made_inert_are_the_names_as_they_were(with_classes, tmp_path):
    folder = tmp_path / 'train'
    folder.mkdir()
    for number, name in enumerate(['-0.png', '=1.png', '2.png']):
        (folder / name).write_bytes(encoded(number))
    (folder / 'labels.csv').write_text("'-0.png,'=ant\n=1.png,bee;=ant\n2.png,\"'@cat;bee\"\n")
    if with_classes:
        (tmp_path / 'classes.txt').write_text("'=ant\nbee\n'@cat\n")
    source = sources.open_source(str(tmp_path), 'train')
    assert set(source.class_names) == {'=ant', 'bee', '@cat'}
    assert source.num_examples == 3


def test_names_of_files_and_classes_are_known_in_either_unicode_normalisation(tmp_path):
    composed, split = 'caf\u00e9', 'cafe\u0301'
    folder = tmp_path / 'train'
    folder.mkdir()
    for number, name in enumerate((f'{split}.png', f'{composed}2.png')):
        (folder / name).write_bytes(encoded(number))
    rows = f'file,label\n{composed}.png,{split}\n{composed}2.png,{composed}\n'
    (folder / 'labels.csv').write_text(rows)
    source = sources.open_source(str(tmp_path), 'train')
    assert source.labels.tolist() == [0, 0]  # one class
    source = sources.open_source(str(tmp_path), 'train', class_names=('bar', composed))
    assert source.labels.tolist() == [1, 1]
