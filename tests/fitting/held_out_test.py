"""Probes predict photos that they have not seen."""

import dataclasses

import numpy as np
import pytest

from tests.support.blobs import blobs
from vit_jax.data.photo_table import Row
from vit_jax.fitting import held_out, probe, record
from vit_jax.fitting.preparation import Data

SPLITS = ['train'] * 60 + ['val'] * 20 + ['test'] * 20


def data_of(features, targets):
    return Data(
        rows=[Row(f'/{k}.jpg', ('abc'[k % 3],), split) for k, split in enumerate(SPLITS)],
        class_names=('a', 'b', 'c'),
        multi_label=False,
        targets=targets,
        features=features.astype(np.float32),
        groups=np.arange(len(SPLITS)),
        balanced=False,
        side=100,
    )


@pytest.fixture
def data():
    features, targets = blobs(len(SPLITS), spread=0.3)
    return data_of(features, targets)


@pytest.fixture
def entries(tmp_path):
    made = record.Record(str(tmp_path), {'data': 'x'})
    made.write('probe', {'strength': 0.01})
    return made


@pytest.mark.parametrize('num_folds', [0, 4])
def test_a_wrong_label_does_not_change_its_own_prediction_much(num_folds, data, entries):
    """A probe that had seen the label of a photo would repeat it."""
    values = held_out.probabilities(entries, data, num_folds)
    assert values.shape == (100, 3)
    np.testing.assert_allclose(values.sum(axis=1), 1, atol=1e-5)
    right = data.targets.argmax(axis=1)
    assert (values.argmax(axis=1) == right).mean() > 0.95
    targets = data.targets.copy()
    targets[7] = np.roll(targets[7], 1)
    changed = held_out.probabilities(entries, dataclasses.replace(data, targets=targets), num_folds)
    assert changed[7].argmax() == right[7]


def test_folds_are_of_train_and_val_and_keep_groups(data):
    data = dataclasses.replace(data, groups=np.arange(100) // 2)
    inside, folds = held_out.cut_into_folds(data, 5)
    assert inside.tolist() == list(range(80))
    assert np.bincount(folds).sum() == 80
    assert np.bincount(folds).min() > 10
    assert (folds[::2] == folds[1::2]).all()


def test_cross_validation_scores_the_probe_of_the_other_folds(data, entries):
    values = held_out.probabilities(entries, data, 4)
    inside, folds = held_out.cut_into_folds(data, 4)
    fold = inside[folds == 1]
    rest = inside[folds != 1]
    head = probe.fit(data.features[rest], data.targets[rest], 0.01, False, False)
    expected = probe.probabilities(head.logits(data.features[fold]), False)
    np.testing.assert_allclose(values[fold], expected, atol=1e-6)
    right = data.targets[inside].argmax(axis=1) == values[inside].argmax(axis=1)
    means = [right[folds == k].mean() for k in range(4)]
    assert entries['cross_validation']['mean'] == pytest.approx(np.mean(means))
