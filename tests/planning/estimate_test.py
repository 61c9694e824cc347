"""What is found by compiling, with a compiler that is told what a step needs."""

import jax
import pytest

from tests.support.programs import small_config
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.planning import estimate, hlo, report
from vit_jax.training import chips


class Compiler:
    """A step needs 1000 bytes and 100 for every image of a device's part, a tenth of it remat."""

    def __init__(self, curve=0.0):
        self.curve, self.asked = curve, []

    def __call__(self, config, target):
        images = config.batch_size // len(target.devices) // config.accum_steps
        self.asked.append((images, config_lib.total_steps(config)))
        each = 10 if config.model.remat_policy == 'nothing_saveable' else 100
        needed = int(1000 + each * images * (1 + self.curve * images))
        return estimate.Step(needed, hlo.Counts(0, {}, {}), 0)


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(estimate, 'compile_step', compiler)
    return compiler


def target(limit):
    return estimate.Target('h100', jax.devices(), True, limit)


def largest(config, limit):
    first = estimate.compile_step(config, target(limit))
    return estimate.largest_batch(config, target(limit), first)


def test_largest_batch(compiler):
    """97 % of the room is (9700 - 1000) / 100 = 87 images, 80 in eights, on eight devices."""
    config = small_config(batch_size=128)
    assert largest(config, 10_000) == (80 * 8, 9000)
    assert [images for images, _ in compiler.asked] == [16, 8, 80]
    assert {steps for _, steps in compiler.asked} == {10}


def test_largest_batch_where_memory_is_no_line(compiler):
    compiler.curve = 0.01
    batch, needed = largest(small_config(batch_size=128), 50_000)
    assert 0.7 * 50_000 < needed <= 50_000
    assert needed == 1000 + 100 * (batch // 8) * (1 + 0.01 * batch / 8)
    assert len(compiler.asked) <= 5


def test_largest_batch_with_accumulation_and_below_the_configs_own(compiler):
    assert largest(small_config(batch_size=256, accum_steps=2), 10_000) == (80 * 8 * 2, 9000)
    assert largest(small_config(batch_size=1024), 5000) == (32 * 8, 4200)


def test_nothing_fits(compiler):
    assert largest(small_config(batch_size=64), 900) is None


def test_fewest_parts(compiler):
    config = estimate.choose_parts(small_config(batch_size=1024, accum_steps=0), target(5000))
    assert config.accum_steps == 4  # 32 of 128 images need 4200 bytes
    with pytest.raises(UserError, match='one image per device needs'):
        estimate.choose_parts(small_config(batch_size=1024, accum_steps=0), target(1000))


def test_what_helps(compiler):
    helps = report.what_helps(small_config(batch_size=1024), target(5000))
    by_field = {next(iter(h['change'])): h for h in helps}
    assert by_field['mesh.fsdp'] == {'change': {'mesh.fsdp': 8, 'mesh.data': 1}, 'needed': 13_800,
                                     'fits': False, 'least_seconds': 0.0}
    assert by_field['model.remat_policy']['fits']
    assert by_field['accum_steps']['change'] == {'accum_steps': 16}
    assert by_field['accum_steps']['needed'] == 1800


def test_roofline():
    chip = chips.get('h100')
    step = estimate.Step(0, hlo.Counts(989 * 10**12, {'all-gather': 45 * 10**10,
                                                      'all-reduce': 45 * 10**10}, {}), 335 * 10**10)
    time = estimate.step_time(target(0), step)
    assert tuple(time) == pytest.approx((1.0, 1.0, 2.0))
    assert (time.least, time.one_after_another) == pytest.approx((2.0, 4.0))
    assert chip.flops == 989e12
    cpu = estimate.Target('cpu', jax.devices(), True, 0)
    assert estimate.step_time(cpu, step) is None
