import types

import pytest

from vit_jax.errors import UserError
from vit_jax.training import accumulation


class Program:
    """Pretends that a step needs 1000 bytes and 100 for every image of a part of the batch."""

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
def test_no_fewer_than_are_computed_fastest(usable, expected, monkeypatch):
    """Which are compiled alone where they fit: larger steps would take their time for nothing."""
    program = Program(batch_size=256, devices=4, fastest_parts=8)
    assert choose(monkeypatch, program, usable) == expected
    assert program.asked[0] == 8
    assert len(program.asked) == {8: 1, 16: 2}[expected]


def test_what_compiling_takes_is_not_free_any_more(monkeypatch):
    program = Program(batch_size=256, devices=4)
    monkeypatch.setattr(
        accumulation,
        'memory_limit',
        lambda: (9000 if not program.asked else 4200.5) / accumulation.HEADROOM,
    )
    assert accumulation.choose(program).config.accum_steps == 2


def test_takes_more_parts_when_the_line_promised_too_much(monkeypatch):
    # The line through 8 and 16 images underestimates 64.
    program = Program(batch_size=64, devices=1, curve=2)
    needed = {n: 1000 + 100 * (64 // n) + 2 * (64 // n) ** 2 for n in (1, 2, 4)}
    assert needed[1] > 10_000 > needed[2]
    assert choose(monkeypatch, program, 10_000) == 2
    assert sorted(program.asked) == sorted(set(program.asked))  # no step is compiled twice


def test_nothing_fits(monkeypatch):
    with pytest.raises(UserError, match='one image per device needs'):
        choose(monkeypatch, Program(batch_size=64, devices=1), 500)


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: 24e9)
    accumulation.check_fits(23e9, 'a step')
    with pytest.raises(
        UserError,
        match='a step needs 135 GB of a device, and 24 GB are available: '
        'lower batch_size .*--config.accum_steps=0',
    ):
        accumulation.check_fits(135e9, 'a step')


def test_a_run_that_lacks_memory_gets_advice_and_another_error_none():
    def fail(message):
        with accumulation.advice_on_memory():
            raise RuntimeError(message)

    with pytest.raises(RuntimeError) as error:
        fail('RESOURCE_EXHAUSTED: 8 TB')
    assert ['accum_steps' in note for note in error.value.__notes__] == [True]
    with pytest.raises(RuntimeError) as error:
        fail('INTERNAL')
    assert not hasattr(error.value, '__notes__')
