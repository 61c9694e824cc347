"""Photos become rows with splits and features."""

import dataclasses
import time

import numpy as np
import pytest

from tests.support import small
from tests.support.datasets import write_images
from tests.support.errors import refused
from vit_jax.fitting import preparation, record
from vit_jax.weights import predictor

CLASSES = ('oak', 'rose', 'tulip')


@pytest.fixture
def prepare(tmp_path):
    """Prepares 36 images, one of them a copy."""
    write_images(tmp_path / 'data', CLASSES, 12)
    (first, second, *_) = sorted((tmp_path / 'data/oak').iterdir())
    second.write_bytes(first.read_bytes())
    settings = record.Settings(str(tmp_path / 'data'), 'weights', 5.0)

    def run():
        (tmp_path / 'fit').mkdir(exist_ok=True)
        stages = record.Record(str(tmp_path / 'fit'), dataclasses.asdict(settings))
        model = small.make('vit')
        return preparation.prepare(settings, str(tmp_path / 'fit'), stages, model, time.monotonic())

    return run


def test_every_photo_has_a_split_and_the_features_of_prediction(prepare, tmp_path):
    data = prepare()
    assert data.class_names == CLASSES
    parts = [data.part(split) for split in ('train', 'val', 'test')]
    assert sorted(np.concatenate(parts).tolist()) == list(range(36))
    for part in parts:
        assert data.targets[part].any(axis=0).all()  # every class
    model = small.make('vit')
    from vit_jax.data import images
    from vit_jax.weights import description

    preprocess = description.complete_preprocess(model)
    photos = np.stack(
        [images.load(file, model.image_size(), preprocess) for file in data.files(parts[1])]
    )
    expected, _ = predictor(model)(photos)
    np.testing.assert_allclose(data.features[parts[1]], expected, rtol=1e-4, atol=1e-4)


def test_a_copy_stays_with_its_original(prepare):
    data = prepare()
    first, second = (
        k
        for k, row in enumerate(data.rows)
        if row.file.endswith(('000.png', '001.png')) and 'oak' in row.file
    )
    assert data.groups[first] == data.groups[second]
    assert data.rows[first].split == data.rows[second].split


def test_a_second_start_reads_what_the_first_wrote(prepare, tmp_path, monkeypatch):
    first = prepare()
    monkeypatch.setattr(preparation, 'Extractor', None)
    second = prepare()
    assert second.rows == first.rows
    np.testing.assert_array_equal(second.features, first.features)


def test_other_labels_are_refused(prepare, tmp_path):
    prepare()
    photo = next((tmp_path / 'data/rose').iterdir())
    photo.rename(tmp_path / 'data/oak' / f'new_{photo.name}')
    with refused('conflict', field='--workdir'):
        prepare()


def test_only_computed_features_are_counted(prepare):
    data = prepare()
    features = data.features.copy()
    features[::2] = np.nan
    data = dataclasses.replace(data, features=features)
    assert set(data.part('train', with_features=True)) == {k for k in data.part('train') if k % 2}
