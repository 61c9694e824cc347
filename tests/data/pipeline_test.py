"""Batches: their order, entering it anywhere, sharing it, and broken images."""

import io
import itertools
import logging
import time

import ml_collections
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from vit_jax.data import order, pipeline, sequential, sources, tfds_source
from vit_jax.errors import UserError

COUNT = 53  # of the small sets; a prime, so that no batch or window fits


def encoded(value, kind='PNG'):
    """A picture that holds its number in its colour."""
    buffer = io.BytesIO()
    Image.new('RGB', (9, 7), (value, value, value)).save(buffer, kind)
    return buffer.getvalue()


def make_config(name, batch_size=8, image_size=(6, 5), **changes):
    config = ml_collections.ConfigDict({
        'seed': 3,
        'batch_size': batch_size,
        'image_size': image_size,
        'dataset': {
            'name': str(name),
            'data_dir': '',
            'max_broken_fraction': 0.5,
            'shuffle_buffer': 10,
            'files_at_once': 16,
        },
        'augment': {'crop': 'inception', 'min_area': 0.3, 'pad': 0, 'flip': True},
        'preprocess': {
            'resize': 'bilinear',
            'crop_ratio': 0.9,
            'mean': (0.5, 0.5, 0.5),
            'std': (0.5, 0.5, 0.5),
        },
    })
    config.update_from_flattened_dict(changes)
    return config


def write_directory(root, count=COUNT):
    for number in range(count):
        folder = root / 'train' / 'ab'[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f'{number:03}.png').write_bytes(encoded(number))
    return make_config(root)


def write_tfds(root, file_format, count=COUNT, files=5):
    """A TFDS set on disk, without code."""
    features = tfds.features.FeaturesDict({
        'image': tfds.features.Image(shape=(None, None, 3)),
        'label': tfds.features.ClassLabel(names=['a', 'b']),
        'number': tfds.features.Scalar(np.int64),
    })
    numbers = np.array_split(np.arange(count), files)
    path = root / 'small' / '1.0.0'
    path.mkdir(parents=True)
    name = tfds.core.ShardedFileTemplate(
        data_dir=path, dataset_name='small', split='train', filetype_suffix=file_format
    )
    for shard, filename in enumerate(name.sharded_filepaths(files)):
        examples = [
            features.serialize_example(
                {'image': io.BytesIO(encoded(i)), 'label': i % 2, 'number': i}
            )
            for i in numbers[shard]
        ]
        write_records(str(filename), examples, file_format)
    split = tfds.core.SplitInfo(
        name='train', shard_lengths=[len(n) for n in numbers], num_bytes=0, filename_template=name
    )
    tfds.folder_dataset.write_metadata(
        data_dir=path,
        features=features,
        split_infos=[split],
        supervised_keys=('image', 'label'),
        check_data=False,  # would read ArrayRecord in a way TFDS cannot
    )
    return make_config('small', **{'dataset.data_dir': str(root)})


def write_records(filename, examples, file_format):
    if file_format == 'tfrecord':
        with tf.io.TFRecordWriter(filename) as writer:
            for example in examples:
                writer.write(example)
    else:
        from array_record.python import array_record_module

        writer = array_record_module.ArrayRecordWriter(filename, 'group_size:1')
        for example in examples:
            writer.write(example)
        writer.close()


KINDS = ('digits', 'directory', 'tfrecord', 'array_record')


@pytest.fixture(params=KINDS)
def config(request, tmp_path):
    return make(request.param, tmp_path)


def make(kind, root):
    if kind == 'digits':
        return make_config('digits', batch_size=200)
    if kind == 'directory':
        return write_directory(root)
    return write_tfds(root, kind)


def batches(config, count, start=0, process=0, processes=1, split='train'):
    source = sources.open_source(config.dataset, split)
    iterator = pipeline.train_batches(source, config, start, process, processes)
    return list(itertools.islice(iterator, count))


def evaluated(config, process=0, processes=1, split='train'):
    source = sources.open_source(config.dataset, split)
    return list(pipeline.eval_batches(source, config, process, processes))


def numbers(found):
    """The numbers that `encoded` put into the images of batches, in order."""
    return [n for b in found for n in np.round(b['image'][b['mask']][:, 0, 0, 0] * 127.5 + 127.5)]


def assert_equal(first, second):
    assert len(first) == len(second)
    for one, two in zip(first, second, strict=True):
        assert sorted(one) == sorted(two) == ['image', 'label', 'mask']
        for key in one:
            np.testing.assert_array_equal(one[key], two[key])


def test_a_later_start_gives_the_same_batches_bit_for_bit(config):
    whole = batches(config, 24)  # more than three epochs
    for start in (1, 7, 13, 20):
        assert_equal(batches(config, 24 - start, start), whole[start:])
    assert not np.array_equal(whole[0]['image'], whole[1]['image'])


def test_finding_the_place_does_not_grow_with_the_epochs_behind_it(config):
    seconds = []
    for start in (5, 10**9):  # 150 million epochs
        began = time.perf_counter()
        batches(config, 1, start=start)
        seconds.append(time.perf_counter() - began)
    assert seconds[1] < seconds[0] + 5


def test_batches_are_normalised_float32_with_labels_of_their_images(config):
    for batch in batches(config, 3):
        assert batch['image'].shape == (config.batch_size, 6, 5, 3)
        assert batch['image'].dtype == np.float32
        assert np.abs(batch['image']).max() <= 1 + 1e-6
        assert batch['label'].dtype == np.int32
        assert batch['mask'].dtype == bool
        assert batch['mask'].all()
        if config.dataset.name != 'digits':
            np.testing.assert_array_equal(np.array(numbers([batch])) % 2, batch['label'])


@pytest.mark.parametrize('kind', KINDS[1:])
def test_every_epoch_holds_every_example_once_in_an_order_of_its_own(kind, tmp_path):
    config = make(kind, tmp_path)
    seen = numbers(batches(config, COUNT))
    epochs = [seen[e * COUNT : (e + 1) * COUNT] for e in range(8)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 8
    with config.unlocked():
        config.seed += 1
    assert numbers(batches(config, 7)) != seen[:56]


@pytest.mark.parametrize('kind', ['digits', 'directory', 'array_record'])
def test_processes_together_see_what_one_sees(kind, tmp_path):
    config = make(kind, tmp_path)
    whole = batches(config, 10)
    for processes in (2, 4):
        parts = [batches(config, 10, 0, process, processes) for process in range(processes)]
        joined = [
            {key: np.concatenate([batch[key] for batch in step]) for key in step[0]}
            for step in zip(*parts, strict=True)
        ]
        assert_equal(joined, whole)


def test_processes_share_the_records_of_sequential_files(tmp_path):
    config = write_tfds(tmp_path, 'tfrecord')
    parts = [numbers(batches(config, 40, 0, process, 2)) for process in (0, 1)]
    for part, count, first in zip(parts, (26, 27), (0, 26), strict=True):
        for epoch in range(40 * 4 // count):
            seen = sorted(part[epoch * count : (epoch + 1) * count])
            assert seen == list(range(first, first + count))


def test_sequential_place_is_found_across_segments_and_windows():
    """Start positions of a set of many files, compared with the stream from the beginning."""
    lengths = np.random.default_rng(0).integers(0, 5, 40)  # of 40 files: three segments
    lengths[7] = 3
    pieces = tfds_source.Pieces(
        np.array(['unused'] * 40, object), lengths * 0, lengths, np.cumsum(lengths) - lengths
    )
    total = int(lengths.sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.data, 'TFRecordDataset', lambda name: tf.data.Dataset.range(100))

        def stream(start, count):
            items = sequential.shuffled(
                pieces,
                start,
                seed=1,
                window=9,
                files_at_once=16,
                replace=lambda i: tf.range(tf.size(i, tf.int64)),
            )
            return [int(item['index']) for item in items.take(count)]

        whole = stream(0, 3 * total)
        for epoch in range(3):
            assert sorted(whole[epoch * total : (epoch + 1) * total]) == list(range(total))
        for start in (1, 8, 9, 10, total // 2, total - 1, total, 2 * total - 3, 2 * total + 40):
            assert stream(start, 3 * total - start) == whole[start:]


def test_files_of_one_epoch_are_mixed(tmp_path):
    """Neighbours in the stream come from different files, even with a window of one record."""
    config = write_tfds(tmp_path, 'tfrecord')
    config.dataset.shuffle_buffer = 1
    seen = np.array(numbers(batches(config, 7)))[:COUNT]
    assert np.mean(np.abs(np.diff(seen)) == 1) < 0.1


def test_permutation_of_the_order_is_fair():
    """Every example is equally likely at every place, and neighbours are not kept."""
    size, epochs = 7, 1050
    places = np.zeros((size, size), int)
    index = order.shuffled_index(tf.range(size * epochs, dtype=tf.int64), size, 0)
    index = index.numpy().reshape(epochs, size)
    for place in range(size):
        places[place] = np.bincount(index[:, place], minlength=size)
    expected = epochs / size
    # Chi-square with 36 degrees of freedom is below 68 but for 1 in 1000.
    assert ((places - expected) ** 2 / expected).sum() < 68
    followed = np.mean(np.diff(index, axis=1) == 1)
    assert abs(followed - 1 / size) < 0.025


def test_augmentation_differs_between_epochs_but_not_between_runs(tmp_path):
    config = make_config('digits', batch_size=1437)
    first, second = batches(config, 2)
    assert_equal([first], batches(config, 1))
    assert not np.array_equal(np.sort(first['image'], 0), np.sort(second['image'], 0))


def test_slices_of_a_split(config):
    rest = evaluated(config, split='train[70%:]')
    part = evaluated(config, split='train[:70%]')
    whole = evaluated(config)
    assert sum(b['mask'].sum() for b in rest + part) == sum(b['mask'].sum() for b in whole)
    joined = sorted(b.tobytes() for found in rest + part for b in found['image'][found['mask']])
    assert joined == sorted(b.tobytes() for found in whole for b in found['image'][found['mask']])


@pytest.mark.parametrize('processes', [1, 2, 4])
def test_evaluation_counts_every_example_once(config, processes):
    source = sources.open_source(config.dataset, 'train')
    parts = [pipeline.eval_batches(source, config, p, processes) for p in range(processes)]
    found = [list(part) for part in parts]
    assert {len(batches) for batches in found} == {len(parts[0])}
    everything = [batch for batches in found for batch in batches]
    assert sum(batch['mask'].sum() for batch in everything) == source.num_examples
    for batch in everything:
        assert batch['image'].shape == (config.batch_size // processes, 6, 5, 3)
        assert not batch['image'][~batch['mask']].any()
        assert not batch['label'][~batch['mask']].any()
    if config.dataset.name != 'digits':
        assert sorted(numbers(everything)) == list(range(COUNT))
    assert_equal(list(parts[0]), found[0])  # a second time


def test_more_processes_than_examples_still_make_equal_batches(tmp_path):
    for kind in ('directory', 'tfrecord'):
        config = make(kind, tmp_path / kind)
        found = [evaluated(config, p, 8, split='train[:3]') for p in range(8)]
        assert [len(batches) for batches in found] == [1] * 8
        assert sum(b['mask'].sum() for batches in found for b in batches) == 3


def break_directory(config, broken):
    """Damages the files of these numbers, each in another way."""
    damage = [b'', b'no image', encoded(1)[:50], encoded(1, 'JPEG')[:-300], encoded(1, 'WEBP')]
    for kind, number in enumerate(broken):
        name = f'{config.dataset.name}/train/{"ab"[number % 2]}/{number:03}.png'
        with open(name, 'wb') as file:
            file.write(damage[kind % len(damage)])


def test_training_takes_the_next_valid_image_for_a_broken_one(tmp_path, caplog):
    config = write_directory(tmp_path)
    config.augment.crop = 'none'
    files = np.array(numbers(evaluated(config)))  # in the order of the source
    healthy = numbers(batches(config, 21))
    # A run of three, across the end of the split, and two more.
    broken = files[[52, 0, 1, 20, 33]].astype(int)
    break_directory(config, broken)
    stand_in = {files[52]: files[2], files[0]: files[2], files[1]: files[2]}
    stand_in |= {files[20]: files[21], files[33]: files[34]}
    with caplog.at_level(logging.WARNING, 'vit_jax.data'):
        found = batches(config, 21)
    assert numbers(found) == [stand_in.get(n, n) for n in healthy]
    for start in (8, 17):
        assert_equal(batches(config, 21 - start, start), found[start:])
    for number in broken:
        name = f'/train/{"ab"[number % 2]}/{number:03}.png'
        lines = [line for line in caplog.messages[:5] if name in line]
        assert len(lines) == 1
        assert lines[0].startswith('skipped broken image ')
    assert caplog.messages[4].endswith('(5 of 53)')
    text = '\n'.join(caplog.messages)
    assert f'{broken[0]:03}.png: the file is empty (' in text
    assert f'{broken[1]:03}.png: not a JPEG, PNG, GIF or BMP image (' in text
    assert f'{broken[2]:03}.png: Invalid PNG data, size 50 (' in text


def test_sequential_training_takes_the_next_valid_record(tmp_path):
    config = write_tfds(tmp_path, 'tfrecord')
    healthy = numbers(batches(config, 21))
    broken = {4, 5, 6, 30}
    rewrite_records(tmp_path, broken)
    found = batches(config, 21)
    seen = numbers(found)
    changed = [(n, m) for n, m in zip(healthy, seen, strict=True) if n != m]
    assert {n for n, _ in changed} == broken
    assert not broken & set(seen)
    for start in (5, 16):
        assert_equal(batches(config, 21 - start, start), found[start:])


def rewrite_records(root, broken):
    for path in root.glob('small/1.0.0/*.tfrecord-*'):
        records = [r.numpy() for r in tf.data.TFRecordDataset(str(path))]
        damaged = []
        for record in records:
            example = tf.train.Example.FromString(record)
            if example.features.feature['number'].int64_list.value[0] in broken:
                example.features.feature['image'].bytes_list.value[0] = b'damaged'
            damaged.append(example.SerializeToString())
        write_records(str(path), damaged, 'tfrecord')


@pytest.mark.parametrize('kind', ['directory', 'tfrecord'])
def test_evaluation_masks_broken_images(kind, tmp_path, caplog):
    config = make(kind, tmp_path)
    healthy = evaluated(config)
    broken = [4, 17, 18, 51]
    if kind == 'directory':
        break_directory(config, broken)
    else:
        rewrite_records(tmp_path, set(broken))
    source = sources.open_source(config.dataset, 'train')
    batches = pipeline.eval_batches(source, config)
    with caplog.at_level(logging.WARNING, 'vit_jax.data'):
        found = list(batches)
    assert len(caplog.messages) == 4
    assert_equal(list(batches), found)
    assert len(caplog.messages) == 4  # known by now
    assert sorted(numbers(found)) == sorted(set(range(COUNT)) - set(broken))
    for one, two in zip(found, healthy, strict=True):
        np.testing.assert_array_equal(one['image'][one['mask']], two['image'][one['mask']])
        assert not one['image'][~one['mask']].any()


def test_too_many_broken_images_stop_the_run(tmp_path):
    config = write_directory(tmp_path)
    config.dataset.max_broken_fraction = 0.05
    break_directory(config, [1, 2])
    assert len(batches(config, 14)) == 14
    break_directory(config, [30])
    with pytest.raises(UserError) as error:
        batches(config, 14)
    message = str(error.value)
    assert message.startswith('too many images are broken: 3 of 53 seen so far, 5.66%; ')
    assert 'dataset.max_broken_fraction allows 5.00%' in message
    assert all(f'{number:03}.png: ' in message for number in (1, 2, 30))
    with pytest.raises(UserError, match='too many images are broken: 3 of 53'):
        evaluated(config)


def test_a_split_without_any_readable_image_stops_in_the_first_batch(tmp_path):
    config = write_directory(tmp_path, count=6)
    config.dataset.max_broken_fraction = 1.0
    break_directory(config, range(6))
    with pytest.raises(UserError, match='6 of 6 seen so far, 100.00%'):
        batches(config, 1)


def test_a_window_without_any_readable_record_stops(tmp_path):
    config = write_tfds(tmp_path, 'tfrecord')
    config.dataset.max_broken_fraction = 1.0
    config.dataset.shuffle_buffer = 1
    rewrite_records(tmp_path, {9})
    with pytest.raises(UserError, match='no readable image is left to stand in .*1 of 53'):
        batches(config, 7)


def test_other_errors_come_through(tmp_path):
    config = write_tfds(tmp_path, 'tfrecord')
    path = min(tmp_path.glob('small/1.0.0/*.tfrecord-*'))
    path.write_bytes(path.read_bytes()[:-1] + b'x')
    with pytest.raises(tf.errors.DataLossError):
        batches(config, 7)


def test_settings_that_do_not_fit_are_named():
    config = make_config('digits', batch_size=9)
    source = sources.open_source(config.dataset, 'train')
    with pytest.raises(UserError, match='batch_size 9 does not divide by 2 processes; take 8'):
        next(pipeline.train_batches(source, config, 0, 0, 2))


def test_tfds_errors_list_splits_and_features(tmp_path):
    config = write_tfds(tmp_path, 'tfrecord')
    with pytest.raises(UserError, match=r"no split 'test' in 'small/1.0.0'; its splits are: train"):
        sources.open_source(config.dataset, 'test')
    misspelt = make_config('smal', **{'dataset.data_dir': str(tmp_path)})
    with pytest.raises(UserError, match='Nearest names: small'):
        sources.open_source(misspelt.dataset, 'train')
    features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
    template = tfds.core.ShardedFileTemplate(
        data_dir=tmp_path / 'words' / '1.0.0',
        dataset_name='words',
        split='train',
        filetype_suffix='tfrecord',
    )
    split = tfds.core.SplitInfo('train', shard_lengths=[1], num_bytes=0, filename_template=template)
    (tmp_path / 'words' / '1.0.0').mkdir(parents=True)
    write_records(str(template.sharded_filepaths(1)[0]), [b''], 'tfrecord')
    tfds.folder_dataset.write_metadata(
        data_dir=tmp_path / 'words' / '1.0.0',
        features=features,
        split_infos=[split],
        check_data=False,
    )
    words = make_config('words', **{'dataset.data_dir': str(tmp_path)})
    with pytest.raises(UserError, match=r'its features are: text \(Text\)'):
        sources.open_source(words.dataset, 'train')


def test_tensorflow_does_not_see_the_accelerator():
    assert tf.config.get_visible_devices('GPU') == []
