import pytest

from vit_jax.training import chips


@pytest.mark.parametrize(
    ('kind', 'tera'),
    [
        ('TPU v4', 275),
        ('TPU v5 lite', 197),
        ('TPU v5e', 197),
        ('TPU v5p', 459),
        ('TPU v5', 459),
        ('TPU v6 lite', 918),
        ('NVIDIA A100-SXM4-80GB', 312),
        ('NVIDIA H100 80GB HBM3', 989),
        ('NVIDIA H200', 989),
        ('NVIDIA B200', 2250),
    ],
)
def test_peak(kind, tera):
    assert chips.peak_flops(kind) == tera * 1e12


def test_unknown_peak():
    assert chips.peak_flops('TPU v3') is None
    assert chips.peak_flops('cpu') is None


def test_all_adapters_of_a_node_send_to_other_nodes():
    h100 = chips.CHIPS['h100']
    assert chips.send_rate(h100, 8) == 450e9
    assert chips.send_rate(h100, 16) == 8 * 50e9
    assert chips.send_rate(chips.CHIPS['v5p'], 512) == 600e9
    assert chips.send_rate(chips.CHIPS['b200'], 64) == 400e9
