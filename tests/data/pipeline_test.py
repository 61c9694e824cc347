"""Batches: their order, starting at any step, sharing between processes, and evaluation."""

import time

import numpy as np
import pytest
import tensorflow as tf
from ml_collections import ConfigDict, FrozenConfigDict

from tests.support.batches import COUNT, KINDS, PREPROCESS, Data, assert_equal, make, numbers
from tests.support.errors import refused
from tests.support.images import files, picture
from vit_jax.data import images

# Both have random access, as directories do.
SLOW = {
    'digits': pytest.param('digits', marks=pytest.mark.slow),
    'array_record': pytest.param('array_record', marks=[pytest.mark.slow, pytest.mark.nightly]),
}


@pytest.fixture(params=[SLOW.get(kind, kind) for kind in KINDS])
def data(request, tmp_path):
    return make(request.param, tmp_path)


def test_batches_after_a_later_start_are_bit_identical(data):
    whole = data.batches(24)  # more than three epochs
    for start in (7, 20):
        assert_equal(data.batches(24 - start, start), whole[start:])
    assert not np.array_equal(whole[0]['image'], whole[1]['image'])


@pytest.mark.slow
def test_starting_at_a_late_step_takes_no_longer(data):
    seconds = []
    for start in (5, 10**9):  # 150 million epochs
        begin = time.perf_counter()
        data.batches(1, start=start)
        seconds.append(time.perf_counter() - begin)
    assert seconds[1] < seconds[0] + 60  # a loop over the earlier epochs would take hours


def test_batches_are_normalised_float32_with_the_labels_of_their_images(data):
    for batch in data.batches(3):
        assert batch['image'].shape == (data.batch_size, 6, 5, 3)
        assert batch['image'].dtype == np.float32
        assert np.abs(batch['image']).max() <= 1 + 1e-6
        assert batch['label'].dtype == np.int32
        assert batch['mask'].dtype == bool
        assert batch['mask'].all()
        if data.name != 'digits':
            np.testing.assert_array_equal(np.array(numbers([batch])) % 2, batch['label'])


@pytest.mark.parametrize('kind', ['directory', 'tfrecord', SLOW['array_record']])
def test_every_epoch_shows_every_example_once_in_its_own_order(kind, tmp_path):
    data = make(kind, tmp_path)
    seen = numbers(data.batches(COUNT))
    epochs = [seen[e * COUNT : (e + 1) * COUNT] for e in range(8)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8
    data.seed += 1
    assert numbers(data.batches(7)) != seen[:56]


@pytest.mark.parametrize('kind', ['directory', *SLOW.values()])
def test_processes_together_read_the_batches_of_one_process(kind, tmp_path):
    data = make(kind, tmp_path)
    whole = data.batches(10)
    parts = [data.batches(10, 0, process, 4) for process in range(4)]
    joined = [
        {key: np.concatenate([batch[key] for batch in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal(joined, whole)


@pytest.mark.slow
def test_balanced_batches_do_not_depend_on_the_start_or_the_number_of_processes(tmp_path):
    """One class has 27 examples and the other 4; each batch shows four of each."""
    data = make('directory', tmp_path, balance=1.0)
    for path in sorted(tmp_path.glob('train/b/*'))[4:]:
        path.unlink()
    whole = data.batches(14)
    assert [batch['label'].sum() for batch in whole] == [4] * 14
    assert all(sorted(n for n in numbers([batch]) if n % 2) == [1, 3, 5, 7] for batch in whole)
    first = [n for n in numbers(whole) if n % 2 == 0]
    assert sorted(first[:27]) == sorted(first[27:54]) == list(range(0, 54, 2))
    assert_equal(data.batches(5, start=9), whole[9:])
    parts = [data.batches(14, 0, process, 4) for process in range(4)]
    assert_equal(
        [
            {key: np.concatenate([batch[key] for batch in step]) for key in step[0]}
            for step in zip(*parts, strict=True)
        ],
        whole,
    )
    data.balance = 0.5
    # 100 of the 200 examples are balanced; the others are three epochs and seven examples.
    assert 0 <= sum(batch['label'].sum() for batch in data.batches(25)) - 50 - 3 * 4 <= 4


@pytest.mark.slow
def test_randaugment_is_a_function_of_the_position_in_the_run():
    plain, data = (Data('digits', batch_size=200, num_ops=num_ops) for num_ops in (0, 2))
    whole = data.batches(2)
    assert not np.array_equal(plain.batches(1)[0]['image'], whole[0]['image'])
    assert_equal(data.batches(1, start=1), whole[1:])
    parts = [data.batches(1, 1, process, 2)[0] for process in range(2)]
    assert_equal(
        [{key: np.concatenate([part[key] for part in parts]) for key in parts[0]}], whole[1:]
    )


def test_processes_share_the_records_of_sequential_files(tmp_path):
    data = make('tfrecord', tmp_path)
    parts = [numbers(data.batches(40, 0, process, 2)) for process in (0, 1)]
    for part, count, first in zip(parts, (26, 27), (0, 26), strict=True):
        for epoch in range(40 * 4 // count):
            seen = sorted(part[epoch * count : (epoch + 1) * count])
            assert seen == list(range(first, first + count))


def test_augmentation_differs_between_epochs_but_not_between_runs():
    data = Data('digits', batch_size=1437)
    first, second = data.batches(2)
    assert_equal([first], data.batches(1))
    assert not np.array_equal(np.sort(first['image'], 0), np.sort(second['image'], 0))


@pytest.mark.slow
def test_settings_may_be_any_kind_of_mapping():
    plain = Data('digits', batch_size=100)
    for kind in (ConfigDict, FrozenConfigDict):
        other = Data('digits', batch_size=100, preprocess=kind(dict(PREPROCESS)))
        assert_equal(other.batches(1), plain.batches(1))


def sorted_images(batches):
    """The bytes of all valid images, sorted."""
    return sorted(image.tobytes() for batch in batches for image in batch['image'][batch['mask']])


def test_two_slices_have_the_images_of_the_whole_split(data):
    rest = data.evaluated(split='train[70%:]')
    part = data.evaluated(split='train[:70%]')
    whole = data.evaluated()
    assert sum(b['mask'].sum() for b in rest + part) == sum(b['mask'].sum() for b in whole)
    assert sorted_images(rest + part) == sorted_images(whole)


@pytest.mark.parametrize('processes', [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_evaluation_counts_every_example_once(data, processes):
    parts = [data.evaluation(p, processes) for p in range(processes)]
    batches_of_parts = [list(part) for part in parts]
    assert {len(batches) for batches in batches_of_parts} == {len(parts[0])}
    all_batches = sum(batches_of_parts, [])
    assert sum(batch['mask'].sum() for batch in all_batches) == data.source().num_examples
    for batch in all_batches:
        assert batch['image'].shape == (data.batch_size // processes, 6, 5, 3)
        assert not batch['image'][~batch['mask']].any()
        assert not batch['label'][~batch['mask']].any()
    if data.name != 'digits':
        assert sorted(numbers(all_batches)) == list(range(COUNT))
    assert_equal(list(parts[0]), batches_of_parts[0])  # iterated a second time


@pytest.mark.slow
def test_more_processes_than_examples_evaluate_equal_numbers_of_batches(tmp_path):
    for kind in ('directory', 'tfrecord'):
        data = make(kind, tmp_path / kind)
        batches_of_parts = [data.evaluated(p, 4, split='train[:3]') for p in range(4)]
        assert [len(batches) for batches in batches_of_parts] == [1] * 4
        assert sum(batch['mask'].sum() for batch in sum(batches_of_parts, [])) == 3


def test_more_processes_than_examples_cannot_train_on_sequential_files(tmp_path):
    data = make('tfrecord', tmp_path)
    with refused('value', value=3):
        data.batches(1, 0, 0, 8, split='train[:3]')


# One ending for each kind of file of tests.support.images, by the first word of its name.
ENDINGS = {
    'png': '.png',
    'jpeg': '.JPG',
    'gif': '.gif',
    'bmp': '.bmp',
    'webp': '.webp',
    'avif': '.avif',
    'tiff': '.tif',
    'ppm': '.ppm',
    'jpeg2000': '.jp2',
}


def write_files(root):
    (root / 'train' / 'a').mkdir(parents=True)
    for name, content in files(size=(45, 61)):
        path = root / 'train' / 'a' / (name.replace(' ', '-') + ENDINGS[name.split()[0]])
        path.write_bytes(content)


def decoded_size(path):
    with open(path, 'rb') as file:
        return images.decode(file.read()).shape[:2]


@pytest.mark.parametrize('image_size', [(45, 61), (32, 40)])
def test_evaluation_and_prediction_have_equal_pixels_for_every_format(image_size, tmp_path):
    write_files(tmp_path)
    preprocess = {**PREPROCESS, 'crop_ratio': 1.0}
    data = Data(str(tmp_path), image_size=image_size, preprocess=preprocess, crop='none')
    source = data.source()
    assert source.num_examples == len(files())
    evaluated = np.concatenate([batch['image'][batch['mask']] for batch in data.evaluated()])
    for index, image in enumerate(evaluated):
        expected = images.load(source.name_of(index), image_size, preprocess)
        if decoded_size(source.name_of(index)) == image_size:
            np.testing.assert_array_equal(image, expected)
        else:
            np.testing.assert_allclose(image, expected, atol=2e-5)
    assert len(evaluated) == source.num_examples


def test_training_and_prediction_have_equal_pixels_for_every_format(tmp_path):
    """An epoch of training has the pixels of prediction, but some images are mirrored."""
    write_files(tmp_path)
    size = (45, 61)
    preprocess = {**PREPROCESS, 'crop_ratio': 1.0}
    data = Data(str(tmp_path), batch_size=1, image_size=size, preprocess=preprocess, crop='none')
    source = data.source()
    shown = {batch['image'][0].tobytes() for batch in data.batches(source.num_examples)}
    for index in range(source.num_examples):
        if decoded_size(source.name_of(index)) == size:  # others are resized, but not cropped
            image = images.load(source.name_of(index), size, preprocess)
            mirrored = np.ascontiguousarray(image[:, ::-1])
            assert {image.tobytes(), mirrored.tobytes()} & shown, source.name_of(index)


@pytest.mark.parametrize('ending', ['.webp', '.tif', '.jp2', '.avif'])
def test_a_directory_of_other_formats_trains(ending, tmp_path):
    for number in range(4):
        folder = tmp_path / 'train' / 'ab'[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(20, 30, seed=number).save(folder / f'{number}{ending}')
    data = Data(str(tmp_path), batch_size=4, image_size=(20, 30), crop='none')
    (batch,) = data.batches(1)
    whole = {**PREPROCESS, 'crop_ratio': 1.0}
    expected = {}
    for path in tmp_path.glob('train/*/*'):
        image = images.load(str(path), (20, 30), whole)
        label = 'ab'.index(path.parent.name)
        expected |= {image.tobytes(): label, np.ascontiguousarray(image[:, ::-1]).tobytes(): label}
    assert [expected[image.tobytes()] for image in batch['image']] == batch['label'].tolist()


def test_tensorflow_does_not_see_the_accelerator():
    assert tf.config.get_visible_devices('GPU') == []
