"""Shapes of TPU slices, and devices that need not exist."""

import importlib.util

import jax
import pytest

from tests.support.errors import refused
from vit_jax.planning import targets
from vit_jax.training import chips


@pytest.mark.parametrize(
    ('chip', 'devices', 'shape'),
    [
        ('v5e', 1, (1, 1)),
        ('v5e', 8, (2, 4)),
        ('v6e', 256, (16, 16)),
        ('v4', 4, (2, 2, 1)),
        ('v5p', 32, (2, 4, 4)),
        ('v5p', 128, (4, 4, 8)),
        ('v5p', 256, (4, 8, 8)),
        ('v5p', 512, (8, 8, 8)),
        ('v5p', 768, (8, 8, 12)),
        ('v5p', 6144, (16, 16, 24)),
    ],
)
def test_the_default_slice_is_the_most_compact_one(chip, devices, shape):
    assert targets.shape_of(chip, devices) == shape


def test_a_topology_determines_the_slice():
    assert targets.shape_of('v5p', 256, '4x4x16') == (4, 4, 16)


@pytest.mark.parametrize('chip', ['v4', 'v5e', 'v5p', 'v6e'])
def test_no_slice_is_larger_than_a_pod(chip):
    sizes = list(targets.shapes(chips.CHIPS[chip]))
    assert max(sizes) == chips.CHIPS[chip].largest
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ('chip', 'devices', 'nearest'),
    [
        ('v5e', 12, '4 (2x2), 8 (2x4), 16 (4x4), 32 (4x8).'),
        ('v5e', 512, '256 (16x16).'),
        ('v5p', 100, '64 (4x4x4), 128 (4x4x8)'),
    ],
)
def test_numbers_without_a_slice_are_refused(chip, devices, nearest):
    with refused(kind='value', field='--devices', value=devices) as error:
        targets.shape_of(chip, devices)
    assert nearest in str(error.value)


@pytest.mark.parametrize('topology', ['4x4', '4x4x4', 'a'])
def test_topologies_of_other_sizes_are_refused(topology):
    with refused(kind='value', field='--topology', value=topology):
        targets.shape_of('v5p', 128, topology)


def test_a_missing_libtpu_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with refused(kind='missing', value='libtpu') as error:
        targets.tpu_devices('v5e', (2, 4))
    assert "pip install -e '.[plan]'" in str(error.value)


def test_too_many_simulated_devices_are_refused_after_the_start_of_jax():
    jax.devices()  # starts JAX, with 8 devices in tests
    with refused(kind='value', field='--devices', value=9):
        targets.simulated_devices(9)
