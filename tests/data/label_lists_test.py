"""Images with several labels: from labels.csv, in batches, and errors about wrong rows."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support.batches import COUNT, Data, assert_equal, encoded, numbers
from tests.support.errors import refused
from vit_jax.data import label_lists, sources

NAMES = ('ant', 'bee', 'cat', 'dog')


def labels_of(number):
    """The labels of the image with a number: one to four names."""
    return [name for k, name in enumerate(NAMES) if number >> k & 1 or k == number % 4]


def write(folder, count=COUNT, names=labels_of, header=''):
    """Writes images NNN.png and their labels.csv; returns the path of the table."""
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


def targets(batches):
    """The expected labels of batches, by the numbers in their images."""
    return [[float(name in labels_of(int(n))) for name in NAMES] for n in numbers(batches)]


def test_lists_of_any_length_become_targets():
    packed = label_lists.pack([[2], [], [0, 3]])
    rows = [label_lists.multi_hot(label_lists.unpack(x), 4).numpy().tolist() for x in packed]
    assert rows == [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]


def test_batches_have_the_targets_of_their_images_and_may_start_at_any_step(data):
    whole = data.batches(24)
    assert data.source().class_names == NAMES
    assert whole[0]['label'].dtype == np.float32
    assert whole[0]['label'].shape == (data.batch_size, 4)
    np.testing.assert_array_equal(np.concatenate([b['label'] for b in whole]), targets(whole))
    assert_equal(data.batches(4, 20), whole[20:])
    seen = numbers(whole)
    assert sorted(seen[:COUNT]) == list(range(COUNT))


def test_processes_together_read_the_batches_of_one_process(data):
    parts = [data.batches(9, process=k, processes=2) for k in range(2)]
    joined = [
        {key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*parts, strict=True)
    ]
    assert_equal(joined, data.batches(9))


@pytest.mark.slow
def test_broken_images_are_replaced_in_training_and_skipped_in_evaluation(data, tmp_path):
    for number in (3, 20):
        (tmp_path / 'train' / f'{number:03}.png').write_bytes(b'no image')
    batches = data.batches(8)
    np.testing.assert_array_equal(np.concatenate([b['label'] for b in batches]), targets(batches))
    assert_equal(data.batches(8), batches)
    evaluated = data.evaluated()
    assert sorted(numbers(evaluated)) == sorted({*range(COUNT)} - {3, 20})
    for batch in evaluated:
        assert not batch['label'][~batch['mask']].any()
    np.testing.assert_array_equal(
        np.concatenate([b['label'][b['mask']] for b in evaluated]), targets(evaluated)
    )


def test_classes_come_from_classes_txt_the_training_split_or_the_table(tmp_path):
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


def test_a_table_of_a_spreadsheet_is_read(tmp_path):
    """It has a byte-order mark, a header and Windows line breaks."""
    path = write(tmp_path / 'train', 5, header='file,labels\n')
    path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes().replace(b'\n', b'\r\n'))
    assert sources.open_source(str(tmp_path), 'train').num_examples == 5


def test_the_header_file_label_gives_single_labels_as_class_folders_do(tmp_path):
    def single_label(number):
        return [NAMES[number % 3]]

    write(tmp_path / 'train', 6, single_label, header='file,label\n')
    source = sources.open_source(str(tmp_path), 'train[:5]', class_names=NAMES)
    assert (source.multi_label, source.class_names) == (False, NAMES)
    for number in range(6):
        folder = tmp_path / 'folders' / 'train' / single_label(number)[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{number:03}.png').write_bytes(encoded(number))
    for root in (tmp_path, tmp_path / 'folders'):
        data = Data(str(root))
        assert data.source().class_names == NAMES[:3]
        batch = data.batches(1)[0]
        assert batch['label'].dtype == np.int32
        assert batch['label'].tolist() == [int(number) % 3 for number in numbers([batch])]


def test_a_table_next_to_class_folders_is_ignored(tmp_path):
    (tmp_path / 'train' / 'ant').mkdir(parents=True)
    (tmp_path / 'train' / 'ant' / '0.png').write_bytes(encoded(0))
    (tmp_path / 'train' / 'labels.csv').write_text('0.png,bee\n')
    source = sources.open_source(str(tmp_path), 'train')
    assert (source.multi_label, source.class_names) == (False, ('ant',))


@pytest.mark.parametrize(
    ('row', 'kind', 'value'),
    [
        ('gone.png,ant\nalso-gone.png,bee', 'content', ['gone.png', 'also-gone.png']),
        ('filename,label', 'content', ['filename']),
        ('000.png,ant', 'content', '000.png'),  # a second row for this image
        ('003.png,', 'content', '003.png'),  # an empty label
        ('003.png,ant;;bee', 'content', '003.png'),
        ('003.png;ant', 'content', ['003.png;ant']),  # another number of columns
        ('003.png,ant,bee', 'content', ['003.png', 'ant', 'bee']),
        ('', 'missing', ['003.png']),  # no row for this image
        ('003.png,"ant', 'content', None),  # not CSV
        ('003.png,yak', 'content', ['yak']),  # an unknown class
    ],
)
def test_wrong_rows_are_errors(row, kind, value, tmp_path):
    path = write(tmp_path / 'train', 3)
    (tmp_path / 'train' / '003.png').write_bytes(encoded(3))
    path.write_text(path.read_text() + row + '\n')
    with refused(kind, file=path, value=value):
        sources.open_source(str(tmp_path), 'train', class_names=NAMES)


def test_the_error_about_missing_images_lists_their_rows(tmp_path):
    path = write(tmp_path / 'train', 3)
    path.write_text(path.read_text() + 'gone.png,ant\nalso-gone.png,bee\n')
    with refused('content', file=path) as caught:
        sources.open_source(str(tmp_path), 'train')
    assert str(caught.value) == (
        f'{path} names 2 file(s) that are not images in its folder. Expected the name of an image '
        f"in '{tmp_path}/train' in each row, and a header file,labels or file,label. Correct or "
        "remove these rows:\n  line 4 names 'gone.png'\n  line 5 names 'also-gone.png'"
    )


def test_wrong_files_are_errors(tmp_path):
    def is_refused(kind, **expected):
        with refused(kind, **expected) as caught:
            sources.open_source(str(tmp_path), 'train')
        return str(caught.value)

    path = write(tmp_path / 'train', 3)
    class_list = tmp_path / 'classes.txt'
    class_list.write_text('ant\nbee')
    message = is_refused('content', file=path, value=['cat'])
    assert f'the classes of {class_list} are: ant, bee.' in message
    class_list.write_text('ant\nbee\ncat\nant')
    is_refused('content', file=class_list)
    os.remove(class_list)
    (tmp_path / 'train' / 'more').mkdir()
    (tmp_path / 'train' / 'more' / '0.png').write_bytes(encoded(0))
    is_refused('content', file=tmp_path / 'train', value=['more'])
    path.write_bytes(b'000.png,\xff')
    is_refused('unreadable', file=path)
    path.write_text('file,label\n000.png,ant\n001.png,bee;cat\n002.png,cat\n')
    is_refused('content', file=path, value='001.png')
    os.remove(path)
    os.mkfifo(path)
    is_refused('unreadable', file=path)


@pytest.mark.parametrize('with_classes', [False, True])
def test_escaped_cells_are_read_as_the_original_names(with_classes, tmp_path):
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


def test_names_of_files_and_classes_match_in_either_unicode_normalisation(tmp_path):
    composed = 'caf\u00e9'
    split = 'cafe\u0301'
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
