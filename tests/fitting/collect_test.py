"""Photos come as folders, tables, or a data set without files."""

import pytest

from tests.support.datasets import write_images
from tests.support.errors import refused
from vit_jax.data import photo_table
from vit_jax.data.photo_table import Row
from vit_jax.fitting.collect import collect

CLASSES = ['oak', 'rose']


def test_folders_of_classes_have_no_split(tmp_path):
    write_images(tmp_path / 'data', CLASSES, 3)
    found = collect(str(tmp_path / 'data'), str(tmp_path / 'x'))
    assert found.splits() == []
    assert sorted(row.file for row in found.rows) == sorted(
        str(path) for path in (tmp_path / 'data').rglob('*.png')
    )
    assert {row.labels[0] for row in found.rows if '/oak/' in row.file} == {'oak'}


@pytest.mark.parametrize('name', ['val', 'valid', 'validation'])
def test_folders_of_splits_have_the_names_of_fit(name, tmp_path):
    for split in ('train', name, 'test'):
        write_images(tmp_path / 'data' / split, CLASSES, 2)
    found = collect(str(tmp_path / 'data'), str(tmp_path / 'x'))
    assert found.splits() == ['train', 'val', 'test']
    assert len(found.rows) == 12


def test_a_table_keeps_groups_and_splits(tmp_path):
    write_images(tmp_path, CLASSES, 1)
    rows = [Row(str(tmp_path / f'{name}/000.png'), (name,), 'Train', '7') for name in CLASSES]
    path = str(tmp_path / 'x.csv')
    photo_table.write(path, rows, multi_label=False)
    found = collect(path, str(tmp_path / 'x'))
    assert [(row.split, row.group) for row in found.rows] == [('train', '7')] * 2
    photo_table.write(path, [row._replace(split='holdout') for row in rows], multi_label=False)
    with refused('choice', file=path, value='holdout'):
        collect(path, str(tmp_path / 'x'))


def test_a_set_without_files_is_written_to_files(tmp_path):
    found = collect('digits', str(tmp_path))
    assert found.splits() == ['train', 'test']
    assert len(found.rows) == 1797
    assert len(list((tmp_path / 'test').iterdir())) == 360


def test_one_class_is_refused(tmp_path):
    write_images(tmp_path, ['oak'], 3)
    with refused('content', value=['oak']):
        collect(str(tmp_path), str(tmp_path / 'x'))
