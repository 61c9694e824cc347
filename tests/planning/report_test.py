"""The numbers of a plan become times and text."""

import jax
import pytest

from vit_jax.planning import estimate, report
from vit_jax.training import chips

GIB = chips.GIB
PLAN = {
    'chip': 'h100',
    'devices': 8,
    'mesh': {'data': 2, 'fsdp': 4, 'tensor': 1},
    'compiler': 'cpu',
    'batch_size': 4096,
    'accum_steps': 2,
    'parameters': 86_567_656,
    'teacher_parameters': 0,
    'memory': {
        'params': GIB,
        'optimizer': 2 * GIB,
        'gradients': GIB,
        'batches': GIB // 2,
        'activations': 4 * GIB,
        'peak': 17 * GIB // 2,
        'teacher': 0,
    },
    'memory_limit': 72 * GIB,
    'fits': True,
    'whole_on_every_device': [],
    'model_flops': 8 * 989 * 10**12,
    'num_steps': 3600,
    'flops_per_device': 989 * 10**12,
    'sent_bytes': {'all-reduce': 1000, 'all-gather': 234},
    'collectives': {'all-reduce': 1, 'all-gather': 12},
    'memory_traffic': 335 * 10**9,
}


def target():
    return estimate.Target('h100', jax.devices(), True, 72 * GIB)


def test_times_follow_from_the_slowest_part():
    """The plan has 1 s of arithmetic and 0.1 s of memory traffic on every device."""
    times = report.times(PLAN, target())
    assert times['seconds']['least'] == 1.0
    assert times['mfu_at_most'] == 1.0
    assert times['images_per_sec_at_most'] == 4096
    assert (times['run_seconds'], times['device_days']) == (3600, pytest.approx(8 / 24))
    assert report.times(PLAN, target()._replace(name='cpu')) == {}


def test_the_text_has_all_numbers():
    lines = report.text(
        PLAN
        | report.times(PLAN, target())
        | {'largest_batch': {'batch_size': 32_768, 'needed': 60 * GIB}}
    ).splitlines()
    assert (
        lines[0] == '8 h100, mesh data 2 x fsdp 4 x tensor 1, batch 4,096 in 2 parts, '
        '86,567,656 parameters'
    )
    for line in (
        '  parameters                1.000 GiB',
        '  peak                      8.500 GiB',
        '  available                72.000 GiB',
        'largest batch that fits: 32,768 (60.000 GiB)',
        'FLOPs per step: 7.912e+15 of the model (three forward passes), 7.912e+15 of the '
        'program, recomputation included',
        'bytes that a device sends per step: 1,234',
        '  all-gather                           234 in 12 calls',
        '  MFU at most 100.0%, 4,096 images/s at most',
    ):
        assert line in lines
    assert 'at least 01:00:00, 0.3 device-days' in lines[-1]
    assert 'THIS DOES NOT FIT.' not in lines


def test_the_text_has_the_numbers_of_a_teacher():
    lines = report.text(
        PLAN | {'teacher_parameters': 236_335_000, 'memory': PLAN['memory'] | {'teacher': GIB // 4}}
    ).splitlines()
    assert lines[0].endswith('86,567,656 parameters, 236,335,000 of the teacher')
    assert '  teacher                   0.250 GiB' in lines
    assert any('of the model (three forward passes, one of the teacher)' in line for line in lines)


def test_the_text_of_a_plan_that_does_not_fit_has_changes():
    refused = {k: v for k, v in PLAN.items() if k not in ('sent_bytes', 'collectives')}
    lines = report.text(
        refused
        | {
            'fits': False,
            'whole_on_every_device': ['head/kernel (7, 5)'],
            'helps': [
                {
                    'change': {'mesh.fsdp': 8, 'mesh.data': 1},
                    'needed': 80 * GIB,
                    'fits': False,
                    'least_seconds': None,
                },
                {
                    'change': {'accum_steps': 4},
                    'needed': 40 * GIB,
                    'fits': True,
                    'least_seconds': 0.0125,
                },
            ],
        }
    ).splitlines()
    for line in (
        'THIS DOES NOT FIT.',
        '  mesh.fsdp 4 divides no axis of head/kernel (7, 5): every device has all of it',
        '  with --config.mesh.fsdp=8 --config.mesh.data=1: 80.000 GiB, does not fit either',
        '  with --config.accum_steps=4: 40.000 GiB, fits, at least 12.50 ms per step',
        '  these are the fewest parts: --config.accum_steps=0 chooses them',
        'no times: there is no compiled step',
    ):
        assert line in lines
