"""A resumed run compares its images with the recorded ones."""

import json
import os

import pytest

from tests.support.batches import encoded
from tests.support.errors import refused
from vit_jax.data import sources
from vit_jax.workdir import data_record

DATASET = {'name': 'photos', 'train_split': 'train', 'eval_split': 'test', 'label': ''}


@pytest.fixture
def photos(tmp_path):
    """A folder {train,test}/{a,b}/N.png."""
    for number in range(12):
        folder = tmp_path / 'photos' / ('train' if number < 8 else 'test') / 'ab'[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{number}.png').write_bytes(encoded(number) + bytes(number))
    return tmp_path / 'photos'


def describe(root):
    """The descriptions of both splits."""
    opened = [sources.open_source(str(root), split) for split in ('train', 'test')]
    descriptions = [data_record.describe(x.num_examples, x.listing()) for x in opened]
    return dict(zip(('train', 'eval'), descriptions, strict=True))


def resume(workdir, root):
    data_record.require_same(str(workdir), DATASET, DATASET, describe(root))


@pytest.fixture
def workdir(photos, tmp_path):
    data_record.write(str(tmp_path), describe(photos))
    return tmp_path


def test_moved_images_are_the_same(photos, workdir):
    resume(workdir, photos)
    for path in photos.rglob('*.png'):
        os.utime(path, (1, 1))
    moved = photos.rename(photos.with_name('moved'))
    resume(workdir, moved)


def rename(root):
    (root / 'a/2.png').rename(root / 'a/20.png')


def replace(root):
    (root / 'a/2.png').write_bytes(b'other')


def move(root):
    (root / 'a/2.png').rename(root / 'b/2.png')


def add(root):
    (root / 'b/new.png').write_bytes(encoded(3))


@pytest.mark.parametrize(
    ('change', 'lines'),
    [
        (rename, ['1 new: a/20.png', '1 missing: a/2.png']),
        (replace, ['1 of another size: a/2.png (']),
        (move, ['1 new: b/2.png', '1 missing: a/2.png']),
        (add, ['8 images then, 9 now', '1 new: b/new.png']),
    ],
)
@pytest.mark.parametrize('listed', [0, 100])
def test_changed_training_images_are_refused(
    change, lines, listed, photos, workdir, tmp_path, monkeypatch
):
    monkeypatch.setattr(data_record, '_LISTED', listed)
    data_record.write(str(workdir), describe(photos))
    change(photos / 'train')
    with refused(kind='conflict', field='dataset.train_split', file=workdir) as error:
        resume(workdir, photos)
    message = str(error.value)
    assert f'the training images of {workdir} have changed since the run started' in message
    assert f'--config.pretrained={workdir}' in message
    assert 'dataset.name' not in message
    if listed:
        assert all(f'  {line}' in message for line in lines)
    else:
        assert '  b: 4 images then, 5 now' in message or '  a: 4 images, with changed' in message


def test_changed_evaluation_images_give_a_warning(photos, workdir, caplog):
    add(photos / 'test')
    resume(workdir, photos)
    assert '4 images then, 5 now' in caplog.text
    assert 'no longer comparable' in caplog.text


def test_another_unicode_normalisation_is_named(photos, tmp_path):
    accented = photos / 'train/a/caf\u00e9.png'
    accented.write_bytes(encoded(1))
    data_record.write(str(tmp_path), describe(photos))
    accented.rename(photos / 'train/a/cafe\u0301.png')
    with refused(kind='conflict', file=tmp_path) as error:
        resume(tmp_path, photos)
    assert 'differ only in Unicode normalisation' in str(error.value)


def test_other_splits_and_runs_without_a_record_are_not_compared(photos, workdir):
    add(photos / 'train')
    other = DATASET | {'train_split': 'train[:90%]'}
    data_record.require_same(str(workdir), DATASET, other, describe(photos))
    nameless = {name: value for name, value in DATASET.items() if name != 'name'}
    data_record.require_same(str(workdir), nameless, DATASET, describe(photos))
    (workdir / data_record.DATA).unlink()
    resume(workdir, photos)


@pytest.mark.parametrize('text', ['', '[]', '{}', '{"train": 1, "eval": 2}'])
def test_damaged_record_is_refused(text, photos, workdir):
    (workdir / data_record.DATA).write_text(text)
    kind = 'content' if text else 'unreadable'
    with refused(kind=kind, file=workdir / data_record.DATA):
        resume(workdir, photos)


@pytest.mark.parametrize('listed', [0, 100])
def test_other_checksum_without_another_change_means_a_damaged_record(
    listed, photos, tmp_path, monkeypatch
):
    monkeypatch.setattr(data_record, '_LISTED', listed)
    data = describe(photos)
    data['train']['checksum'] += 1
    data_record.write(str(tmp_path), data)
    with refused(kind='conflict', file=tmp_path) as error:
        resume(tmp_path, photos)
    assert 'data.json in the workdir may be damaged' in str(error.value)


def test_labels_of_a_table_are_compared(tmp_path):
    folder = tmp_path / 'photos/train'
    folder.mkdir(parents=True)
    checksums = []
    for header, labels in (('labels', 'a;b'), ('labels', 'a'), ('label', 'a'), ('label', 'b')):
        rows = [f'file,{header}']
        for number in range(3):
            (folder / f'{number}.png').write_bytes(encoded(number))
            rows.append(f'{number}.png,{labels if number else "b"}')
        (folder / 'labels.csv').write_text('\n'.join(rows))
        source = sources.open_source(str(tmp_path / 'photos'), 'train', class_names=('a', 'b'))
        checksums.append(data_record.describe(3, source.listing())['checksum'])
    assert len(set(checksums)) == 4


@pytest.mark.parametrize('kind', ['tfrecord', 'array_record'])
def test_tfds_split_is_described_by_its_metadata(kind, tfds_directory):
    def describe_split(split):
        source = sources.open_source('dots', split, data_dir=str(tfds_directory[kind]))
        return data_record.describe(source.num_examples, source.listing())

    whole = describe_split('train')
    assert whole == describe_split('train')
    assert whole['checksum'] != describe_split('train[:50%]')['checksum']
    assert json.dumps(whole)


def test_same_training_images_in_another_order_are_refused(tmp_path):
    """Files outside of a slice affect the order. Evaluation does not depend on the order."""
    for name, count in (('ant', 9), ('bee', 4)):
        (tmp_path / 'photos/train' / name).mkdir(parents=True)
        for number in range(count):
            (tmp_path / 'photos/train' / name / f'{number}.png').write_bytes(encoded(number))

    def described():
        source = sources.open_source(str(tmp_path / 'photos'), 'train[:90%]')
        return data_record.describe(source.num_examples, source.listing())

    before = described()
    rows = [('ant', '1', 5), ('bee', '2', 5), ('ant', '3', 5)]
    forward = data_record.describe(3, rows)
    backward = data_record.describe(3, rows[::-1])
    assert forward['checksum'] == backward['checksum']
    assert forward['order'] != backward['order']
    data_record.write(str(tmp_path), {'train': before, 'eval': before})
    now = before | {'order': before['order'] ^ 1}
    with refused(kind='conflict', file=tmp_path) as error:
        data_record.require_same(str(tmp_path), DATASET, DATASET, {'train': now, 'eval': before})
    assert 'in another order' in str(error.value)
    data_record.require_same(str(tmp_path), DATASET, DATASET, {'train': before, 'eval': now})
    assert described() == before
