"""The Python interface: preparation of files, predictions, and errors for other arrays."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support import small
from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.small import message
from vit_jax import models, weights
from vit_jax.data import images
from vit_jax.data.preprocess import normalise
from vit_jax.weights.apply import as_pixels

GIVEN = small.make('vit')


def test_files_give_the_probabilities_of_the_model(tmp_path):
    write_images(tmp_path, ['one'], 2, size=(20, 30))
    paths = sorted(tmp_path.glob('*/*.png'))
    batch = weights.prepare(GIVEN, paths)
    np.testing.assert_array_equal(
        batch, [images.load(str(path), (16, 16), GIVEN.preprocess) for path in paths]
    )
    features, probabilities = weights.predictor(GIVEN)(batch)
    logits = small.logits(GIVEN, batch)
    expected = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(probabilities, expected / expected.sum(-1, keepdims=True), rtol=1e-4)
    assert features.shape == (2, 128)
    headless = small.make('headless')
    assert weights.predictor(headless)(batch)[1] is None
    with refused('value', field='paths', value=str(paths[0])):
        weights.prepare(GIVEN, str(paths[0]))


def test_as_pixels_inverts_the_preparation():
    image = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3)).astype(np.uint8)
    preprocess = {'mean': (0.485, 0.456, 0.406), 'std': (0.229, 0.224, 0.225)}
    prepared = np.asarray(normalise(image.astype(np.float32), preprocess))
    np.testing.assert_array_equal(as_pixels(prepared, preprocess), image)


@pytest.mark.parametrize('pool', nightly_but(['map'], ['cls', 'gap', 'map']))
def test_features_of_a_bfloat16_model_are_float32(pool, tmp_path):
    """NumPy has no bfloat16: a file would have two bytes without a type."""
    low = small.make('vit', pool=pool, dtype='bfloat16')
    features, probabilities = weights.predictor(low)(FINE)
    np.savez(tmp_path / 'f.npz', features=features, probabilities=probabilities)
    with np.load(tmp_path / 'f.npz') as found:
        assert {found[name].dtype for name in found} == {np.dtype(np.float32)}
    exact = weights.predictor(small.make('vit', pool=pool))(FINE)[0]
    np.testing.assert_allclose(features, exact, atol=0.05 * np.abs(exact).max())


@pytest.mark.parametrize(('number', 'expected'), [(8, 8), (12, 4), (3, 1)])
def test_images_are_split_over_the_devices_of_a_cpu(number, expected, monkeypatch):
    """tests/conftest.py makes eight; a batch uses the largest number that divides its size."""
    batch, put, used = small.images(GIVEN, number), jax.device_put, []

    def device_put(x, device):
        used.append(device.num_devices)
        return put(x, device)

    monkeypatch.setattr(jax, 'device_put', device_put)
    several = weights.predictor(GIVEN)(batch)
    assert used == [expected] * 2  # parameters and images
    monkeypatch.setattr(jax, 'local_device_count', lambda: 1)
    alone = weights.predictor(GIVEN)(batch)
    assert used[2:] == [1, 1]
    for x, y in zip(several, alone, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6 * np.linalg.norm(y, axis=-1).max())


def test_weights_without_preprocess_use_defaults_and_name_them(tmp_path, caplog):
    write_images(tmp_path, ['one'], 1, size=(20, 30))
    bare = dataclasses.replace(GIVEN, preprocess=None)
    batch = weights.prepare(bare, list(tmp_path.glob('*/*.png')))
    assert batch.shape == (1, 16, 16, 3)
    assert [record.levelname for record in caplog.records] == ['WARNING']
    assert (
        'vit does not say antialias, crop_ratio, fit, mean, resize, std, uint8_resize of images'
        in caplog.text
    )
    caplog.clear()
    stated = weights.described(
        bare,
        [
            'fit=squash,crop_ratio=0.8',
            'resize=bicubic',
            'antialias=True,mean=0.4,0.5,0.6',
            'std=0.3,0.2,0.1,uint8_resize=True',
        ],
    )
    np.testing.assert_array_equal(
        weights.prepare(stated, list(tmp_path.glob('*/*.png'))),
        weights.prepare(GIVEN, list(tmp_path.glob('*/*.png'))),
    )
    assert not caplog.messages


FINE = small.images(GIVEN)


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        (np.zeros((1, 16, 16, 3), np.uint8), 'images have dtype uint8: expected float32'),
        (np.full((1, 16, 16, 3), 255.0), 'images have values from 255 to 255: expected prepared'),
        (np.full((1, 16, 16, 3), np.nan), 'images have values from nan to nan'),
        (FINE[0], 'images have shape (16, 16, 3): expected [batch, height, width, channels]'),
        (FINE[..., :1], 'images have shape (2, 16, 16, 1): expected [batch, height, width, 3]'),
        (FINE[:0], 'images have shape (0, 16, 16, 3): expected one or more'),
        (FINE.reshape(2, 8, 32, 3), 'images have 8x32 pixels: the position embeddings of vit'),
        (FINE[:, :8], 'images have 8x16 pixels: the position embeddings of vit'),
    ],
    ids=lambda x: str(x)[-20:],
)
def test_images_that_are_not_prepared_are_refused(given, expected):
    predict = weights.predictor(GIVEN)
    predict(FINE)
    assert expected in message(predict, given)


def test_message_about_values_that_are_not_prepared():
    with refused('value', field='images') as error:
        weights.predictor(GIVEN)(np.full((1, 16, 16, 3), 255.0))
    assert str(error.value) == (
        'images have values from 255 to 255: expected prepared images, (pixels / 255 - mean) / '
        'std, with values from -6 to 4. Let prepare read files.'
    )


@pytest.mark.parametrize('name', ['vit', 'hybrid', 'bit'])
def test_models_accept_only_batches_of_normalised_images(name):
    given = small.make(name)
    model, batch = models.build(given.model, 7), small.images(given)
    for wrong, value in (
        (batch.astype(np.uint8), np.dtype('uint8')),
        (batch[0], batch[0].shape),
    ):
        with refused('value', field='images', value=value):
            model.apply({'params': given.params}, wrong)


def test_a_grid_that_is_not_stated_may_be_any():
    guessed = dataclasses.replace(
        GIVEN, preprocess={name: x for name, x in GIVEN.preprocess.items() if name != 'image_size'}
    )
    assert weights.predictor(guessed)(FINE.reshape(2, 8, 32, 3))[1].shape == (2, 7)


def test_paths_may_be_path_objects_and_are_not_empty(tmp_path):
    weights.save(GIVEN, str(tmp_path / 'w.safetensors'), 'vit_jax')
    assert weights.load(tmp_path / 'w.safetensors').source == str(tmp_path / 'w.safetensors')
    with refused('value', field='paths', value=[]):
        weights.prepare(GIVEN, [])
