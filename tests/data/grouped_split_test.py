"""Every part has every class in proportion, and no group is in two parts."""

import numpy as np
import pytest

from vit_jax.data import grouped_split

RNG = np.random.default_rng(0)


@pytest.mark.parametrize('seed', range(3))
def test_a_cut_keeps_groups_together_and_classes_in_proportion(seed):
    labels = RNG.choice(4, 600, p=[0.55, 0.3, 0.1, 0.05])
    groups = np.arange(600)
    groups[:90] //= 3
    part = grouped_split.cut(np.eye(4, dtype=bool)[labels], groups, [0.8, 0.1, 0.1], seed=seed)
    for group in np.unique(groups):
        assert len(set(part[groups == group])) == 1
    for label in range(4):
        of_class = np.bincount(part[labels == label], minlength=3)
        share = np.array([0.8, 0.1, 0.1]) * of_class.sum()
        assert np.abs(of_class - share).max() <= 3


@pytest.mark.parametrize('count', [3, 4, 7])
def test_small_classes_have_an_image_in_every_part(count):
    targets = np.repeat(np.eye(5, dtype=bool), count, axis=0)
    part = grouped_split.cut(targets, np.arange(len(targets)), [0.8, 0.1, 0.1], at_least=1)
    for number in range(3):
        assert targets[part == number].sum(axis=0).min() >= 1


def test_a_cut_of_images_with_several_labels():
    targets = RNG.random((500, 6)) < 0.3
    part = grouped_split.cut(targets, np.arange(500), [0.8, 0.2])
    shares = targets[part == 1].sum(axis=0) / targets.sum(axis=0)
    assert np.abs(shares - 0.2).max() < 0.04
