"""The search for batch sizes, with a fake compiler whose steps need a known memory."""

import jax
import numpy as np
import pytest

from tests.support.programs import small_config
from vit_jax.errors import UserError
from vit_jax.objectives.teacher import Teacher
from vit_jax.parallel import feeding
from vit_jax.planning import estimate, report
from vit_jax.training import chips

IDLE = {'flops_per_device': 0, 'sent_bytes': {}, 'collectives': {}, 'memory_traffic': 0}


class Compiler:
    """A fake compiler.

    A step needs 1000 bytes, and 100 bytes for every image of a part on a device, or 10 with
    rematerialisation. `curve` makes the memory quadratic.
    """

    def __init__(self, curve=0.0):
        self.curve = curve
        self.calls = []  # (images, steps)

    def __call__(self, program, target):
        config = program.config
        images = config.batch_size // len(target.devices) // config.accum_steps
        self.calls.append((images, program.num_steps))
        bytes_per_image = 10 if config.model.remat_policy == 'nothing_saveable' else 100
        needed = int(1000 + bytes_per_image * images * (1 + self.curve * images))
        return estimate.Step(needed, IDLE)


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(estimate, 'compile_step', compiler)
    return compiler


def target(limit):
    return estimate.Target('h100', jax.devices(), True, limit)


def largest(config, limit):
    program = target(limit).program(config)
    first = estimate.compile_step(program, target(limit))
    return estimate.largest_batch(program, target(limit), first)


def test_the_largest_batch_is_a_multiple_of_eight_per_device(compiler):
    """97 % of the memory fits (9700 - 1000) / 100 = 87 images on each of eight devices."""
    config = small_config(batch_size=128)
    assert largest(config, 10_000) == (80 * 8, 9000)
    assert [images for images, _ in compiler.calls] == [16, 8, 80]
    assert {steps for _, steps in compiler.calls} == {10}


def test_the_largest_batch_fits_if_memory_is_not_linear(compiler):
    compiler.curve = 0.01
    batch, needed = largest(small_config(batch_size=128), 50_000)
    assert 0.7 * 50_000 < needed <= 50_000
    assert needed == 1000 + 100 * (batch // 8) * (1 + 0.01 * batch / 8)
    assert len(compiler.calls) <= 5


def test_largest_batch_with_accumulation_and_below_the_configs_own(compiler):
    assert largest(small_config(batch_size=256, accum_steps=2), 10_000) == (80 * 8 * 2, 9000)
    assert largest(small_config(batch_size=1024), 5000) == (32 * 8, 4200)


def test_no_batch_fits(compiler):
    assert largest(small_config(batch_size=64), 900) is None


def test_the_batch_is_split_into_the_fewest_parts(compiler):
    config = small_config(batch_size=1024, accum_steps=0)
    program, step = estimate.compile_split(target(5000).program(config), target(5000))
    assert program.config.accum_steps == 4  # 32 of 128 images need 4200 bytes
    assert step.needed == 4200
    assert len(compiler.calls) == len(set(compiler.calls))  # no step is compiled twice
    with pytest.raises(UserError):
        estimate.compile_split(target(1000).program(config), target(1000))


def test_changes_that_help_are_compiled(compiler):
    helps = report.what_helps(target(5000).program(small_config(batch_size=1024)), target(5000))
    by_field = {next(iter(change['change'])): change for change in helps}
    assert by_field['mesh.fsdp'] == {
        'change': {'mesh.fsdp': 8, 'mesh.data': 1},
        'needed': 13_800,
        'fits': False,
        'least_seconds': 0.0,
    }
    assert by_field['model.remat_policy']['fits']
    # accum_steps=0 would choose the same parts: 32 of 128 images at a time.
    assert by_field['accum_steps']['change'] == {'accum_steps': 4}
    assert by_field['accum_steps']['needed'] == 4200
    assert len(compiler.calls) == 1 + 1 + 3


def test_not_even_one_image_at_a_time_fits(compiler):
    config = small_config(batch_size=1024)
    helps = report.what_helps(target(1050).program(config), target(1050))
    assert helps[-1]['change'] == {'accum_steps': 128}
    assert (helps[-1]['needed'], helps[-1]['fits']) == (1100, False)
    config = small_config(batch_size=1024, accum_steps=128)
    helps = report.what_helps(target(1050).program(config), target(1050))
    assert not any('accum_steps' in change['change'] for change in helps)


def test_step_seconds_are_the_roofline():
    work = {
        'flops_per_device': 989 * 10**12,
        'memory_traffic': 335 * 10**10,
        'sent_bytes': {'all-gather': 45 * 10**10, 'all-reduce': 45 * 10**10},
    }
    assert estimate.step_seconds(target(0), work) == pytest.approx(
        {'arithmetic': 1.0, 'memory': 1.0, 'links': 2.0, 'least': 2.0, 'one_after_another': 4.0}
    )
    assert chips.CHIPS['h100'].flops == 989e12
    cpu = estimate.Target('cpu', jax.devices(), True, 0)
    assert estimate.step_seconds(cpu, work) is None


def test_memory_has_as_many_batches_as_training():
    """The batch of the step, and the batches that `feeding.feed` prefetches to the devices."""
    program = target(0).program(small_config(batch_size=16))
    image_label_and_mask = 2 * (4 * 32 * 32 * 3 + 4 + 1)  # two images on each of eight devices
    memory = estimate.memory(program, 10**9)
    assert memory['batches'] == (1 + feeding.BATCHES_UNDER_WAY) * image_label_and_mask
    assert sum(memory.values()) == 2 * memory['peak'] == 2 * 10**9


def test_memory_of_a_teacher():
    """The mesh splits the teacher's parameters."""
    shapes = {'head': {'kernel': jax.ShapeDtypeStruct((32, 6), np.float32)}}
    teacher = Teacher(None, {}, shapes, 0, (32, 32), None, None, 1.0, 1.0)
    config = small_config(**{'mesh.fsdp': 8, 'mesh.data': 1, 'teacher.weights': 'given'})
    memory = estimate.memory(target(0)._replace(teacher=teacher).program(config), 10**9)
    assert memory['teacher'] == 32 * 6 * 4 // 8
    assert sum(memory.values()) == 2 * memory['peak']


def test_a_compiled_step_has_the_work_of_one_device():
    # No other test compiles this program; a program from the cache would have no HLO text.
    program = target(0).program(small_config(**{'mesh.fsdp': 8, 'mesh.data': 1, 'batch_size': 24}))
    step = estimate.compile_step(program, target(0))
    assert step.work['flops_per_device'] == program.flops_of_train_step() / 8
    assert set(step.work['sent_bytes']) >= {'all-gather', 'reduce-scatter'}
    assert step.needed > estimate.memory(program, 0)['params']
