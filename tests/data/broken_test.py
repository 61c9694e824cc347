"""Images that cannot be decoded: who stands in for them, and when a run stops."""

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
from vit_jax.data import broken, images, pipeline
from vit_jax.errors import UserError


@pytest.mark.slow
def test_training_takes_the_next_valid_image_for_a_broken_one(tmp_path, caplog):
    data = write_directory(tmp_path, crop='none')
    files = np.array(numbers(data.evaluated()))  # in the order of the source
    healthy = numbers(data.batches(21))
    # A run of three, across the end of the split, and two more.
    broken = files[[52, 0, 1, 20, 33]].astype(int)
    break_files(data, broken)
    stand_in = {files[52]: files[2], files[0]: files[2], files[1]: files[2]}
    stand_in |= {files[20]: files[21], files[33]: files[34]}
    with caplog.at_level(logging.WARNING, 'vit_jax.data'):
        found = data.batches(21)
    assert numbers(found) == [stand_in.get(n, n) for n in healthy]
    assert_equal(data.batches(4, start=17), found[17:])
    for number in broken:
        name = f'/train/{"ab"[number % 2]}/{number:03}.png'
        lines = [line for line in caplog.messages[:5] if name in line]
        assert len(lines) == 1
        assert lines[0].startswith('skipped broken image ')
    assert caplog.messages[4].endswith('(5 of 53)')
    text = '\n'.join(caplog.messages)
    assert f'{broken[0]:03}.png: the file is empty (' in text
    assert f'{broken[1]:03}.png: not an image of {", ".join(images.FORMATS)} (' in text
    assert f'{broken[2]:03}.png: Invalid PNG data, size 50 (' in text


@pytest.mark.slow
def test_sequential_training_takes_the_next_valid_record(tmp_path):
    data = make('tfrecord', tmp_path)
    healthy = numbers(data.batches(21))
    damaged = {4, 5, 30}
    break_records(tmp_path, damaged)
    found = data.batches(21)
    seen = numbers(found)
    changed = [(n, m) for n, m in zip(healthy, seen, strict=True) if n != m]
    assert {n for n, _ in changed} == damaged
    assert not damaged & set(seen)
    assert_equal(data.batches(5, start=16), found[16:])


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
    batches = data.evaluation()
    with caplog.at_level(logging.WARNING, 'vit_jax.data'):
        found = list(batches)
    assert len(caplog.messages) == 4
    assert_equal(list(batches), found)
    assert len(caplog.messages) == 4  # known by now
    assert len(batches.broken) == 4
    assert batches.broken == sorted(batches.broken)
    assert sorted(numbers(found)) == sorted(set(range(COUNT)) - set(broken))
    for one, two in zip(found, healthy, strict=True):
        np.testing.assert_array_equal(one['image'][one['mask']], two['image'][one['mask']])
        assert not one['image'][~one['mask']].any()


@pytest.mark.slow
def test_too_many_broken_images_stop_the_run(tmp_path):
    data = write_directory(tmp_path, max_broken_fraction=0.05)
    break_files(data, [1, 2])
    assert len(data.batches(14)) == 14
    break_files(data, [30])
    with pytest.raises(UserError) as error:
        data.batches(14)
    message = str(error.value)
    assert message.startswith('too many images are broken: 3 of 53, 5.66%; ')
    assert 'dataset.max_broken_fraction allows 5.00%' in message
    assert all(f'{number:03}.png: ' in message for number in (1, 2, 30))
    with pytest.raises(UserError, match='too many images are broken: 3 of 53'):
        data.evaluated()


@pytest.mark.parametrize('kind', ['directory', pytest.param('tfrecord', marks=pytest.mark.slow)])
def test_all_broken_images_are_listed_at_once(kind, tmp_path):
    """Also those that the run would have met later."""
    data, broken = make(kind, tmp_path, max_broken_fraction=0.0), [1, 2, 30, 52]
    if kind == 'directory':
        break_files(data, broken)
    else:
        break_records(tmp_path, set(broken))
    with pytest.raises(UserError) as error:
        data.batches(14)
    message = str(error.value)
    assert message.startswith('too many images are broken: 4 of 53, 7.55%; ')
    assert len(message.splitlines()) == 5


def test_one_that_no_batch_has_met_is_listed_without_a_word_of_tensorflow(tmp_path, caplog):
    """TensorFlow would warn of a function that several threads trace at the same time."""
    data = write_directory(tmp_path, max_broken_fraction=0.0)
    next(tmp_path.glob('train/*')).joinpath('link.png').symlink_to('nowhere')
    with pytest.raises(UserError, match='too many images are broken: 1 of 54, 1.85%'):
        data.batches(1)
    assert {line.name for line in caplog.records} == {'vit_jax.data'}


def test_a_split_without_any_readable_image_stops_in_the_first_batch(tmp_path):
    data = write_directory(tmp_path, count=6, max_broken_fraction=1.0)
    break_files(data, range(6))
    with pytest.raises(UserError, match='6 of 6, 100.00%'):
        data.batches(1)


@pytest.mark.slow
def test_a_window_without_any_readable_record_stops(tmp_path):
    data = make('tfrecord', tmp_path, max_broken_fraction=1.0, shuffle_buffer=1)
    break_records(tmp_path, {9})
    with pytest.raises(UserError, match='no readable image is left to take the place .*1 of 53'):
        data.batches(7)


@pytest.mark.parametrize('damage', [lambda x: x[:-1] + b'x', lambda x: x[: len(x) // 2]])
def test_a_file_of_many_images_that_is_damaged(damage, tmp_path):
    """No image of it is known to be broken."""
    data = make('tfrecord', tmp_path)
    path = min(tmp_path.glob('small/1.0.0/*.tfrecord-*'))
    path.write_bytes(damage(path.read_bytes()))
    for read in (data.evaluated, lambda: data.batches(20)):
        with pytest.raises(
            UserError,
            match=f'a file of the data set in {path.parent} cannot be '
            'read: (truncated|corrupted) record at .*damaged or',
        ):
            read()


def fail_once_as_read(monkeypatch, times):
    """The next images fail as training reads them, and never as they are examined."""
    left = [times]
    train_image = pipeline.train_image

    def failing(encoded, *args):
        def fail(content):
            if left[0]:
                left[0] -= 1
                raise ValueError('half of a file')
            return content

        encoded = tf.ensure_shape(tf.numpy_function(fail, [encoded], tf.string), [])
        return train_image(encoded, *args)

    monkeypatch.setattr(pipeline, 'train_image', failing)
    monkeypatch.setattr(pipeline, '_PARALLEL', 1)


def test_an_image_that_is_whole_when_it_is_examined_is_read_again(tmp_path, monkeypatch, caplog):
    """As of a photo that another program writes at that moment."""
    data = write_directory(tmp_path)
    whole = data.batches(5)
    fail_once_as_read(monkeypatch, 1)
    assert_equal(data.batches(5), whole)
    assert 'half of a file' in caplog.text
    assert 'reading it again' in caplog.text
    assert 'skipped broken image' not in caplog.text


def test_a_batch_that_fails_again_stops_with_the_files_that_changed_last(tmp_path, monkeypatch):
    data = write_directory(tmp_path)
    fail_once_as_read(monkeypatch, 10**6)
    with pytest.raises(UserError, match='half of a file') as error:
        data.batches(5)
    assert f'changed last: {tmp_path}/train/' in str(error.value)


def test_a_scan_finds_broken_images_and_changes_no_batch(tmp_path):
    data = write_directory(tmp_path, crop='none')
    break_files(data, [4, 17, 30])
    unscanned = data.batches(14)
    source = data.source()
    reasons, seen = broken.scan(source, 60)
    assert sorted(source.name_of(index)[-7:] for index in reasons) == [
        '004.png',
        '017.png',
        '030.png',
    ]
    assert seen == COUNT
    scanned = broken.with_broken(source, reasons)
    assert scanned.unreadable == reasons
    half = broken.with_broken(source, [min(reasons)])
    for known in (scanned, half):
        assert_equal(Known(**vars(data), known=known).batches(14), unscanned)


@dataclasses.dataclass
class Known(Data):
    """A data set, of which some broken images are known."""

    known: object = None

    def source(self, split='train'):
        return self.known


def test_a_scan_is_limited_in_time_and_processes_begin_apart(tmp_path):
    data = write_directory(tmp_path)
    break_files(data, range(COUNT))
    source = data.source()
    assert broken.scan(source, 0) == ({}, 0)
    found = []

    def stop():
        if len(found) == 1:
            raise SystemExit

    with pytest.raises(SystemExit):
        broken.scan(source, 60, check=lambda: (stop(), found.append(1)))


@pytest.mark.parametrize('kind', ['digits', 'tfrecord', 'array_record'])
def test_only_files_of_this_machine_are_scanned(kind, tmp_path):
    assert broken.scan(make(kind, tmp_path).source(), 60) == ({}, 0)


def test_too_many_that_a_scan_has_found_are_listed(tmp_path):
    data = write_directory(tmp_path)
    break_files(data, [1, 2, 30])
    source = data.source()
    reasons, seen = broken.scan(source, 60)
    source = broken.with_broken(source, reasons)
    broken.require_few(source, 0.06, seen)
    with pytest.raises(UserError, match='too many images are broken: 3 of 53, 5.66%') as error:
        broken.require_few(source, 0.05, seen)
    assert len(str(error.value).splitlines()) == 4
