"""The images of a run."""

import hashlib
import os

import numpy as np
import pytest
import tensorflow as tf

from tests.support.batches import make
from tests.support.errors import refused
from tests.support.resolved import leave_begun, resolve, write_folder
from vit_jax import config as config_lib
from vit_jax import machine
from vit_jax.data import heic, order, sequential, sources, subsets
from vit_jax.reporting import collect
from vit_jax.scoring import split
from vit_jax.training import run_data
from vit_jax.workdir import record


def test_cache_shrinks_training_images_only(tmp_path, image_directory):
    """The place of the cache does not matter to a run, but the size of its images does."""
    fields = {
        'dataset.name': str(image_directory),
        'dataset.train_split': 'train',
        'dataset.eval_split': 'test',
        'image_size': (8, 8),
        'augment.crop': 'inception',
        'evals.fewshot.shots': (1,),
    }
    cache = fields | {
        'dataset.cache': 'disk',
        'dataset.cache_size': 8,
        'dataset.cache_dir': str(tmp_path / 'f'),
    }
    plain = resolve(tmp_path / 'a', **fields)
    small = resolve(tmp_path / 'b', **cache)
    assert len(list((tmp_path / 'f').rglob('*.bmp'))) == 60

    def first_images(batches):
        return next(iter(batches))['image']

    assert not np.array_equal(
        first_images(plain.train_batches()), first_images(small.train_batches())
    )
    np.testing.assert_array_equal(
        first_images(plain.eval_batches), first_images(small.eval_batches)
    )
    files = small.train_data.fetch(np.arange(60))['path'].numpy()
    assert all(path.startswith(os.fsencode(image_directory)) for path in files)
    moved = config_lib.changed(small.config, {'dataset.cache_dir': '/elsewhere'})
    assert config_lib.differences(small.config, moved) == []
    larger = config_lib.changed(small.config, {'dataset.cache_size': 9})
    assert config_lib.differences(small.config, larger) == [
        'dataset.cache_size: 8 in the workdir, 9 now'
    ]


@pytest.mark.parametrize(
    ('available', 'buffer', 'processes', 'fits'),
    [
        (2 * 53, 10**6, 1, True),  # no window has more examples than there are
        (2 * 53 - 1, 10**6, 1, False),
        (2 * 53 - 1, 10**6, 2, True),
        (20, 10, 1, True),
        (19, 10, 1, False),
    ],
)
def test_two_windows_of_shuffled_examples_need_memory(
    available, buffer, processes, fits, tmp_path, monkeypatch
):
    """Every example has one byte."""
    source = make('tfrecord', tmp_path).source()
    monkeypatch.setattr(sequential, 'bytes_per_record', lambda pieces: 1.0)
    monkeypatch.setattr(machine, 'available_memory', lambda: available)
    if fits:
        run_data.check_shuffle_memory(source, buffer, processes)
        return
    with refused('resource', field='dataset.shuffle_buffer', value=buffer) as error:
        run_data.check_shuffle_memory(source, buffer, processes)
    assert f'--config.dataset.shuffle_buffer={int(0.8 * available / 3)},' in str(error.value)


def test_a_source_without_windows_needs_no_memory_for_them(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, 'available_memory', lambda: 0)
    run_data.check_shuffle_memory(make('digits', tmp_path).source(), 10**6, 1)


@pytest.mark.slow
def test_the_numbers_of_a_subset_are_those_of_the_run(tmp_path):
    """A recipe states the number of examples of the whole split."""
    fields = {
        'dataset.subset': '10%',
        'dataset.num_examples': 1437,
        'num_steps': 0,
        'num_epochs': 4.0,
        'loss.class_weights': ('balanced',),
        'dataset.balance': 1.0,
    }
    run = resolve(tmp_path, **fields)
    counts = np.bincount(run.train_data.labels)
    assert (run.config.dataset.num_examples, counts.sum(), run.program.num_steps) == (144, 144, 18)
    np.testing.assert_allclose(run.config.loss.class_weights, 14.4 / counts)
    labels = np.concatenate([next(run.train_batches(start_step=k))['label'] for k in range(5)])
    assert (np.bincount(labels) == 16).all()
    record.write(str(tmp_path), run.config, tuple('0123456789'))
    (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
    assert resolve(tmp_path, **fields).config.loss == run.config.loss
    with refused('conflict') as error:
        resolve(tmp_path, **fields | {'dataset.subset': '144'})
    assert 'dataset.subset' in str(error.value)


def test_the_path_of_a_directory_becomes_absolute(image_directory, tmp_path, monkeypatch):
    monkeypatch.chdir(image_directory.parent)
    run = resolve(tmp_path / 'run', **{'dataset.name': image_directory.name})
    assert run.config.dataset.name == str(image_directory)
    run = resolve(tmp_path / 'other', **{'evals.fewshot.dataset': image_directory.name})
    assert run.config.evals.fewshot.dataset == str(image_directory)


def test_a_class_without_training_images_is_refused(tmp_path):
    full = {'ant': 8, 'bee': 8, 'cat': 8}
    fields = write_folder(tmp_path / 'data', {'train': full, 'test': full})
    run = resolve(tmp_path / 'full', **fields)
    for path in (tmp_path / 'data' / 'train' / 'cat').iterdir():
        path.unlink()
    with refused('content', field='dataset.train_split', value='train') as error:
        resolve(tmp_path / 'new', **fields)
    assert 'has no images of 1 of 3 classes: cat' in str(error.value)
    # Masked patch prediction does not learn classes from labels.
    resolve(
        tmp_path / 'masked',
        **fields,
        **{
            'masked.target': 'mean_color',
            'model.pool': 'gap',
            'model.representation_size': 0,
        },
    )
    assert run.train_data.num_examples == 24


def test_resumed_run_of_an_earlier_version_leaves_heic_photos_out(tmp_path, monkeypatch, caplog):
    """A new run reads them."""
    monkeypatch.setattr(heic, 'is_installed', lambda: True)
    fields = write_folder(
        tmp_path / 'data', {'train': {'ant': 5, 'bee': 5}, 'test': {'ant': 2, 'bee': 2}}
    )
    begun = tmp_path / 'begun'
    leave_begun(begun, resolve(tmp_path / 'new', **fields), without=['heic'])
    photo = tmp_path / 'data' / 'train' / 'ant' / 'IMG_1.HEIC'
    photo.write_bytes((tmp_path / 'data' / 'train' / 'ant' / '1.png').read_bytes())
    resumed = resolve(begun, **fields)
    assert resumed.config.dataset.heic is False
    assert 'dataset.heic stays False' in caplog.text
    assert resumed.train_data.num_examples == 10
    assert resolve(tmp_path / 'newer', **fields).train_data.num_examples == 11


def test_resumed_run_of_an_earlier_version_keeps_the_order_of_its_images(tmp_path, caplog):
    """The earlier version cut slices from the files in the order of the hashes of their names."""
    fields = write_folder(tmp_path / 'data', {'train': {'ant': 31, 'bee': 17, 'cat': 6}})
    fields |= {
        'dataset.train_split': 'train[:90%]',
        'dataset.eval_split': 'train[90%:]',
        'dataset.subset': '50%',
    }
    new = resolve(tmp_path / 'new', **fields)
    begun = tmp_path / 'begun'
    leave_begun(begun, new, without=['stratify'])
    resumed = resolve(begun, **fields)
    assert resumed.config.dataset.stratify is False
    assert 'dataset.stratify stays False' in caplog.text

    def names(source):
        return [source.name_of(index) for index in range(source.num_examples)]

    paths = [f'{path.parent.name}/{path.name}' for path in (tmp_path / 'data').glob('train/*/*')]
    paths.sort(key=lambda path: hashlib.blake2b(path.encode()).digest())
    by_hash = [str(tmp_path / 'data' / 'train' / path) for path in paths]
    assert names(resumed.eval_data) == by_hash[49:]
    subset = order.permute(tf.range(24, dtype=tf.int64), subsets._KEY, 49).numpy()
    assert names(resumed.train_data) == [by_hash[index] for index in subset]
    assert names(new.eval_data) != by_hash[49:]
    assert len(set(new.train_data.labels)) == len(set(new.eval_data.labels)) == 3
    # All other commands open the same slices.
    dataset = split.dataset_of(str(begun), {'name': None})
    assert names(sources.open_split(dataset, dataset['eval_split'])) == by_hash[49:]
    config, _ = collect.read(str(begun))
    assert config['dataset']['stratify'] is False
    # Another order is another run.
    leave_begun(tmp_path / 'new', new)
    with refused('conflict') as error:
        resolve(tmp_path / 'new', **fields, **{'dataset.stratify': False})
    assert 'dataset.stratify' in str(error.value)
