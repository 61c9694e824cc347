import types

import pytest

from tests.support.errors import refused
from vit_jax.training import accumulation


class Program:
    """A fake program: a step needs 1000 bytes, and 100 for every image of a part of the batch."""

    def __init__(self, batch_size, devices, curve=0, accum_steps=0, asked=None, fastest_parts=1):
        self.config = types.SimpleNamespace(batch_size=batch_size, accum_steps=accum_steps)
        self.mesh = types.SimpleNamespace(shape={'data': devices, 'fsdp': 1, 'tensor': 1})
        self.curve, self.asked = curve, [] if asked is None else asked
        self.fastest_parts = fastest_parts

    def with_accum_steps(self, accum_steps):
        return Program(
            self.config.batch_size, self.mesh.shape['data'], self.curve, accum_steps, self.asked
        )

    @property
    def train_step(self):
        part = self.config.batch_size // self.mesh.shape['data'] // self.config.accum_steps
        self.asked.append(part)
        analysis = types.SimpleNamespace(
            argument_size_in_bytes=900,
            output_size_in_bytes=600,
            alias_size_in_bytes=500,
            temp_size_in_bytes=100 * part + self.curve * part**2,
        )
        return types.SimpleNamespace(memory_analysis=lambda: analysis)


def choose(monkeypatch, program, usable, reserved=0):
    limit = (usable + reserved + 0.5) / accumulation.HEADROOM
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: limit)
    return accumulation.choose(program, reserved).config.accum_steps


@pytest.mark.parametrize(
    ('usable', 'accum_steps'), [(1e9, 1), (7400, 1), (7399, 2), (4200, 2), (4199, 4), (1100, 64)]
)
@pytest.mark.parametrize('reserved', [0, 5000])
def test_fewest_parts_that_fit(usable, accum_steps, reserved, monkeypatch):
    program = Program(batch_size=256, devices=4)
    assert choose(monkeypatch, program, usable, reserved) == accum_steps
    assert len(program.asked) <= 3
    assert program.config.accum_steps == 0


@pytest.mark.parametrize(('usable', 'expected'), [(1800, 8), (1799, 16)])
def test_the_fastest_number_of_parts_is_the_least(usable, expected, monkeypatch):
    """If these parts fit, no other step is compiled."""
    program = Program(batch_size=256, devices=4, fastest_parts=8)
    assert choose(monkeypatch, program, usable) == expected
    assert program.asked[0] == 8
    assert len(program.asked) == {8: 1, 16: 2}[expected]


def test_memory_is_measured_after_compiling(monkeypatch):
    program = Program(batch_size=256, devices=4)
    monkeypatch.setattr(
        accumulation,
        'memory_limit',
        lambda: (9000 if not program.asked else 4200.5) / accumulation.HEADROOM,
    )
    assert accumulation.choose(program).config.accum_steps == 2


def test_more_parts_are_used_if_the_line_underestimates_a_step(monkeypatch):
    # The line through 8 and 16 images underestimates 64.
    program = Program(batch_size=64, devices=1, curve=2)
    needed = {n: 1000 + 100 * (64 // n) + 2 * (64 // n) ** 2 for n in (1, 2, 4)}
    assert needed[1] > 10_000 > needed[2]
    assert choose(monkeypatch, program, 10_000) == 2
    assert sorted(program.asked) == sorted(set(program.asked))  # no step is compiled twice


def test_a_step_of_one_image_that_does_not_fit_is_refused(monkeypatch):
    with refused('resource'):
        choose(monkeypatch, Program(batch_size=64, devices=1), 500)


def test_a_step_that_does_not_fit_is_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: 24e9)
    accumulation.check_fits(23e9, 'a step')
    with refused('resource') as error:
        accumulation.check_fits(135e9, 'a step')
    assert str(error.value) == (
        'a step needs 135 GB of a device, and 24 GB are available: lower batch_size or image_size, '
        'use a smaller model, or split the batch by --config.accum_steps=0 (into parts that fit) '
        'or N.'
    )


def test_only_errors_about_memory_get_advice():
    def fail(message):
        with accumulation.advice_on_memory():
            raise RuntimeError(message)

    with pytest.raises(RuntimeError) as error:
        fail('RESOURCE_EXHAUSTED: 8 TB')
    assert ['accum_steps' in note for note in error.value.__notes__] == [True]
    with pytest.raises(RuntimeError) as error:
        fail('INTERNAL')
    assert not hasattr(error.value, '__notes__')
