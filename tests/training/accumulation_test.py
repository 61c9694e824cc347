import types

import pytest

from vit_jax.errors import UserError
from vit_jax.training import accumulation


class Compiler:
    """Pretends that a step needs 1000 bytes and 100 for every image of a part."""

    def __init__(self, images, curve=0):
        self.images, self.curve, self.asked = images, curve, []

    def __call__(self, accum_steps):
        part = self.images // accum_steps
        self.asked.append(part)
        analysis = types.SimpleNamespace(
            argument_size_in_bytes=900, output_size_in_bytes=600, alias_size_in_bytes=500,
            temp_size_in_bytes=100 * part + self.curve * part**2)
        return types.SimpleNamespace(memory_analysis=lambda: analysis, accum_steps=accum_steps)


def choose(monkeypatch, compiler, batch_size, devices, usable, reserved=0):
    limit = (usable + reserved + 0.5) / accumulation.HEADROOM
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: limit)
    return accumulation.choose(compiler, batch_size, devices, reserved)


@pytest.mark.parametrize(('usable', 'accum_steps'), [
    (1e9, 1), (7400, 1), (7399, 2), (4200, 2), (4199, 4), (1100, 64)])
@pytest.mark.parametrize('reserved', [0, 5000])
def test_fewest_parts_that_fit(usable, accum_steps, reserved, monkeypatch):
    compiler = Compiler(images=64)
    chosen, compiled = choose(monkeypatch, compiler, 256, 4, usable, reserved)
    assert chosen == accum_steps
    assert compiled.accum_steps == accum_steps
    assert len(compiler.asked) <= 3


def test_takes_more_parts_when_the_line_promised_too_much(monkeypatch):
    compiler = Compiler(images=64, curve=2)  # the line through 8 and 16 images underestimates 64
    chosen, _ = choose(monkeypatch, compiler, 64, 1, 10_000)
    needed = {n: 1000 + 100 * (64 // n) + 2 * (64 // n)**2 for n in (1, 2, 4)}
    assert needed[1] > 10_000 > needed[2]
    assert chosen == 2


def test_nothing_fits(monkeypatch):
    with pytest.raises(UserError, match='one image per device needs'):
        choose(monkeypatch, Compiler(images=64), 64, 1, 500)
