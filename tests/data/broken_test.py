"""Images that cannot be decoded: which images replace them, and when a run stops."""

import dataclasses
import logging

import numpy as np
import pytest
import tensorflow as tf

from tests.support.batches import (
    COUNT,
    Data,
    assert_equal,
    break_files,
    break_records,
    make,
    numbers,
    write_directory,
)
from tests.support.errors import refused
from vit_jax.data import broken, images, pipeline


@pytest.mark.slow
def test_training_replaces_a_broken_image_by_the_next_valid_one(tmp_path, caplog):
    data = write_directory(tmp_path, crop='none')
    files = np.array(numbers(data.evaluated()))  # in the order of the source
    healthy = numbers(data.batches(21))
    # Three neighbours across the end of the split, and two more.
    broken = files[[52, 0, 1, 20, 33]].astype(int)
    break_files(data, broken)
    replacement = {files[52]: files[2], files[0]: files[2], files[1]: files[2]}
    replacement |= {files[20]: files[21], files[33]: files[34]}
    with caplog.at_level(logging.WARNING, 'vit_jax.data'):
        batches = data.batches(21)
    assert numbers(batches) == [replacement.get(n, n) for n in healthy]
    assert_equal(data.batches(4, start=17), batches[17:])
    for number in broken:
        name = f'/train/{"ab"[number % 2]}/{number:03}.png'
        lines = [line for line in caplog.messages[:5] if name in line]
        assert len(lines) == 1
        assert lines[0].startswith('Skipped broken image ')
    assert caplog.messages[4].endswith('(5 of 53)')
    text = '\n'.join(caplog.messages)
    assert f'{broken[0]:03}.png: the file is empty (' in text
    assert f'{broken[1]:03}.png: not an image of {", ".join(images.FORMATS)} or HEIC (' in text
    assert f'{broken[2]:03}.png: Invalid PNG data, size 50 (' in text


@pytest.mark.slow
def test_sequential_training_replaces_a_broken_record_by_the_next_valid_one(tmp_path):
    data = make('tfrecord', tmp_path)
    healthy = numbers(data.batches(21))
    damaged = {4, 5, 30}
    break_records(tmp_path, damaged)
    batches = data.batches(21)
    shown = numbers(batches)
    replaced = {before for before, after in zip(healthy, shown, strict=True) if before != after}
    assert replaced == damaged
    assert not damaged & set(shown)
    assert_equal(data.batches(5, start=16), batches[16:])


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['directory', 'tfrecord'])
def test_evaluation_masks_broken_images(kind, tmp_path, caplog):
    data = make(kind, tmp_path)
    healthy = data.evaluated()
    broken = [4, 17, 18, 51]
    if kind == 'directory':
        break_files(data, broken)
    else:
        break_records(tmp_path, set(broken))
    evaluation = data.evaluation()
    with caplog.at_level(logging.WARNING, 'vit_jax.data'):
        batches = list(evaluation)
    assert len(caplog.messages) == 4
    assert_equal(list(evaluation), batches)
    assert len(caplog.messages) == 4  # the second iteration already knows them
    assert len(evaluation.broken) == 4
    assert evaluation.broken == sorted(evaluation.broken)
    assert sorted(numbers(batches)) == sorted(set(range(COUNT)) - set(broken))
    for batch, whole in zip(batches, healthy, strict=True):
        valid = batch['mask']
        np.testing.assert_array_equal(batch['image'][valid], whole['image'][valid])
        assert not batch['image'][~valid].any()


@pytest.mark.slow
def test_too_many_broken_images_stop_the_run(tmp_path):
    data = write_directory(tmp_path, max_broken_fraction=0.05)
    break_files(data, [1, 2])
    assert len(data.batches(14)) == 14
    break_files(data, [30])
    with refused('unreadable', field='dataset.max_broken_fraction', value=3) as caught:
        data.batches(14)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        'too many images are broken: 3 of 53, 5.66%; dataset.max_broken_fraction allows 5.00%. '
        'Fix or remove them, or raise this limit:'
    )
    assert [line.partition('.png: ')[0][-3:] for line in lines[1:]] == ['002', '030', '001']
    with refused('unreadable', field='dataset.max_broken_fraction', value=3):
        data.evaluated()


@pytest.mark.parametrize('kind', ['directory', pytest.param('tfrecord', marks=pytest.mark.slow)])
def test_all_broken_images_are_listed_together(kind, tmp_path):
    """The list includes images that the run would have read later."""
    data = make(kind, tmp_path, max_broken_fraction=0.0)
    broken = [1, 2, 30, 52]
    if kind == 'directory':
        break_files(data, broken)
    else:
        break_records(tmp_path, set(broken))
    with refused('unreadable', field='dataset.max_broken_fraction', value=4) as caught:
        data.batches(14)
    assert len(str(caught.value).splitlines()) == 5


def test_a_broken_image_before_the_first_batch_causes_no_warning_of_tensorflow(tmp_path, caplog):
    """TensorFlow would warn if several threads traced a function at the same time."""
    data = write_directory(tmp_path, max_broken_fraction=0.0)
    next(tmp_path.glob('train/*')).joinpath('link.png').symlink_to('nowhere')
    with refused('unreadable', field='dataset.max_broken_fraction', value=1):
        data.batches(1)
    assert {line.name for line in caplog.records} == {'vit_jax.data'}


def test_a_split_without_any_readable_image_stops_in_the_first_batch(tmp_path):
    data = write_directory(tmp_path, count=6, max_broken_fraction=1.0)
    break_files(data, range(6))
    with refused('unreadable', field=None, value=6):
        data.batches(1)


@pytest.mark.slow
def test_a_window_without_any_readable_record_stops(tmp_path):
    data = make('tfrecord', tmp_path, max_broken_fraction=1.0, shuffle_buffer=1)
    break_records(tmp_path, {9})
    with refused('unreadable', field=None, value=1):
        data.batches(7)


@pytest.mark.parametrize('damage', [lambda x: x[:-1] + b'x', lambda x: x[: len(x) // 2]])
def test_a_damaged_file_of_many_images_stops_the_run(damage, tmp_path):
    """The broken image in the file is not known."""
    data = make('tfrecord', tmp_path)
    path = min(tmp_path.glob('small/1.0.0/*.tfrecord-*'))
    path.write_bytes(damage(path.read_bytes()))
    for read in (data.evaluated, lambda: data.batches(20)):
        with refused('unreadable', file=path.parent) as caught:
            read()
        assert ' record at ' in str(caught.value)  # TensorFlow's reason


def fail_in_training(monkeypatch, times):
    """Makes the next images fail when training reads them, but not when they are examined."""
    failures_left = times
    train_image = pipeline.train_image

    def failing(encoded, *args):
        def fail(content):
            nonlocal failures_left
            if failures_left:
                failures_left -= 1
                raise ValueError('half of a file')
            return content

        encoded = tf.ensure_shape(tf.numpy_function(fail, [encoded], tf.string), [])
        return train_image(encoded, *args)

    monkeypatch.setattr(pipeline, 'train_image', failing)
    monkeypatch.setattr(pipeline, '_PARALLEL', 1)


def test_an_image_that_is_whole_when_it_is_examined_is_read_again(tmp_path, monkeypatch, caplog):
    """Another program may have been writing the photo at that moment."""
    data = write_directory(tmp_path)
    whole = data.batches(5)
    fail_in_training(monkeypatch, 1)
    assert_equal(data.batches(5), whole)
    assert 'half of a file' in caplog.text
    assert 'reading it again' in caplog.text
    assert 'Skipped broken image' not in caplog.text


def test_a_batch_that_fails_again_stops_with_the_files_that_changed_last(tmp_path, monkeypatch):
    data = write_directory(tmp_path)
    fail_in_training(monkeypatch, 10**6)
    with refused('unreadable') as caught:
        data.batches(5)
    assert 'half of a file' in str(caught.value)
    assert f'changed last: {tmp_path}/train/' in str(caught.value)


def test_a_scan_finds_broken_images_and_changes_no_batch(tmp_path):
    data = write_directory(tmp_path, crop='none')
    break_files(data, [4, 17, 30])
    unscanned = data.batches(14)
    source = data.source()
    reasons, num_examined = broken.scan(source, 60)
    names = sorted(source.name_of(index)[-7:] for index in reasons)
    assert names == ['004.png', '017.png', '030.png']
    assert num_examined == COUNT
    scanned = broken.with_broken(source, reasons)
    assert scanned.unreadable == reasons
    half = broken.with_broken(source, [min(reasons)])
    for known in (scanned, half):
        assert_equal(Known(**vars(data), known=known).batches(14), unscanned)


@dataclasses.dataclass
class Known(Data):
    """A data set with some broken images that are known."""

    known: object = None

    def source(self, split='train'):
        return self.known


def test_a_scan_ends_after_its_time_and_when_its_check_raises(tmp_path):
    data = write_directory(tmp_path)
    break_files(data, range(COUNT))
    source = data.source()
    assert broken.scan(source, 0) == ({}, 0)
    num_checks = 0

    def stop_at_the_second_check():
        nonlocal num_checks
        num_checks += 1
        if num_checks == 2:
            raise SystemExit

    with pytest.raises(SystemExit):
        broken.scan(source, 60, check=stop_at_the_second_check)


@pytest.mark.parametrize('kind', ['digits', 'tfrecord', 'array_record'])
def test_only_files_of_this_machine_are_scanned(kind, tmp_path):
    assert broken.scan(make(kind, tmp_path).source(), 60) == ({}, 0)


def test_too_many_broken_images_of_a_scan_are_listed(tmp_path):
    data = write_directory(tmp_path)
    break_files(data, [1, 2, 30])
    source = data.source()
    reasons, num_examined = broken.scan(source, 60)
    source = broken.with_broken(source, reasons)
    broken.require_few(source, 0.06, num_examined)
    with refused('unreadable', field='dataset.max_broken_fraction', value=3) as caught:
        broken.require_few(source, 0.05, num_examined)
    assert len(str(caught.value).splitlines()) == 4
