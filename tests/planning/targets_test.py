import importlib.util

import jax
import pytest

from vit_jax.errors import UserError
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
def test_most_compact_slice(chip, devices, shape):
    assert targets.shape_of(chip, devices) == shape


def test_given_topology():
    assert targets.shape_of('v5p', 256, '4x4x16') == (4, 4, 16)


@pytest.mark.parametrize('chip', ['v4', 'v5e', 'v5p', 'v6e'])
def test_no_slice_is_larger_than_a_pod(chip):
    sizes = list(targets.shapes(chips.CHIPS[chip]))
    assert max(sizes) == chips.CHIPS[chip].largest
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ('chip', 'devices', 'topology', 'message'),
    [
        (
            'v5e',
            12,
            '',
            r'12 devices are no slice of v5e. The nearest are: 4 \(2x2\), 8 \(2x4\), '
            r'16 \(4x4\), 32 \(4x8\)',
        ),
        ('v5e', 512, '', r'The nearest are: .*256 \(16x16\)'),
        ('v5p', 100, '', r'64 \(4x4x4\), 128 \(4x4x8\)'),
        ('v5p', 128, '4x4', '--topology=4x4 is no slice of 128 v5p chips: expected 3 numbers'),
        ('v5p', 128, '4x4x4', r'multiply to --devices. Slices: .*128 \(4x4x8\)'),
        ('v5p', 128, 'a', '--topology=a is no slice'),
    ],
)
def test_no_such_slice(chip, devices, topology, message):
    with pytest.raises(UserError, match=message):
        targets.shape_of(chip, devices, topology)


def test_libtpu_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r"needs libtpu: pip install -e '.\[plan\]'"):
        targets.tpu_devices('v5e', (2, 4))


def test_more_simulated_devices_than_there_are():
    jax.devices()  # JAX has started
    with pytest.raises(UserError, match='this process has 8 devices and 9 were asked for'):
        targets.simulated_devices(9)
