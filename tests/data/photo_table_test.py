"""Tables of photos: what a CSV file names is what a source shows."""

import numpy as np
import pytest

from tests.support.datasets import write_images
from tests.support.errors import refused
from vit_jax.data import photo_table, sources
from vit_jax.data.photo_table import Row

CLASSES = ('oak', 'rose')


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path, CLASSES, 6)
    return tmp_path


def write(folder, text):
    path = folder / 'photos.csv'
    path.write_text(text)
    return str(path)


def rows_of(folder):
    splits = ['train'] * 4 + ['val'] * 2
    return [
        Row(str(folder / name / f'{k:03}.png'), (name,), split)
        for name in CLASSES
        for k, split in enumerate(splits)
    ]


def test_a_written_table_reads_back(folder):
    path = str(folder / 'photos.csv')
    rows = [row._replace(group=f'{k}') for k, row in enumerate(rows_of(folder))]
    photo_table.write(path, rows, multi_label=False)
    table = photo_table.read(path)
    assert table.rows == tuple(rows)
    assert (table.class_names(), table.splits()) == (CLASSES, ('train', 'val'))


def test_names_that_look_like_formulas_read_back(folder):
    path = str(folder / 'photos.csv')
    row = Row(str(folder / 'oak/000.png'), ('=1+1', '@x'), 'train', '-7')
    photo_table.write(path, [row], multi_label=True)
    assert photo_table.read(path).rows == (row,)


def test_a_source_has_the_rows_of_its_split(folder):
    path = str(folder / 'photos.csv')
    photo_table.write(path, rows_of(folder), multi_label=False)
    source = sources.open_source(path, 'val')
    named = {source.name_of(k): source.class_names[source.labels[k]] for k in range(4)}
    assert named == {row.file: row.labels[0] for row in rows_of(folder) if row.split == 'val'}


def test_a_table_in_the_order_of_the_folder_shows_the_same_images(folder):
    path = str(folder / 'photos.csv')
    rows = [row._replace(split='') for row in rows_of(folder)]
    photo_table.write(path, rows, multi_label=False)
    of_table = sources.open_source(path, 'train[:50%]')
    of_folder = sources.open_source(str(folder), 'train[:50%]')
    names = [[source.name_of(k) for k in range(6)] for source in (of_table, of_folder)]
    assert names[0] == names[1]
    np.testing.assert_array_equal(of_table.labels, of_folder.labels)
    assert [*of_table.listing()] == [*of_folder.listing()]


def test_several_labels(folder):
    path = write(folder, 'labels,file\noak;rose,oak/000.png\nrose,rose/000.png\n')
    source = sources.open_source(path, 'train')
    assert source.multi_label
    assert sorted(map(list, source.label_lists)) == [[0, 1], [1]]


@pytest.mark.parametrize(
    ('text', 'kind'),
    [
        ('', 'content'),
        ('file,label\n', 'content'),
        ('file,kind\noak/000.png,oak\n', 'content'),
        ('file,label,labels\noak/000.png,oak,oak\n', 'content'),
        ('file,label\noak/000.png\n', 'content'),
        ('file,label\noak/000.png,\n', 'content'),
        ('file,label\noak/000.png,oak\noak/000.png,oak\n', 'content'),
        ('file,label\noak/999.png,oak\n', 'content'),
        ('file,label\nphotos.csv,oak\n', 'content'),
        ('file,label\n"oak/000.png,oak\n', 'content'),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(folder, text, kind):
    path = write(folder, text)
    with refused(kind, file=path):
        photo_table.read(path)


def test_a_table_of_images_on_another_machine_is_read_on_request(folder):
    path = write(folder, 'file,label,split\nfar/away.png,oak,val\n')
    with refused('content', file=path):
        photo_table.read(path)
    (row,) = photo_table.read(path, require_files=False).rows
    assert (row.labels, row.split) == (('oak',), 'val')


def test_a_missing_table_and_split_are_refused(folder):
    with refused('unreadable', file=folder / 'no.csv'):
        photo_table.read(str(folder / 'no.csv'))
    path = str(folder / 'photos.csv')
    photo_table.write(path, rows_of(folder), multi_label=False)
    with refused('unknown', file=path, value='test'):
        sources.open_source(path, 'test')
