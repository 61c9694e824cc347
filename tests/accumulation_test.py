import types

import pytest

from vit_jax import accumulation
from vit_jax.errors import UserError


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


@pytest.mark.parametrize(('limit', 'accum_steps'), [(1e9, 1), (7500, 1), (7400, 2), (4200, 4)])
def test_fewest_parts_that_fit(limit, accum_steps):
    compiler = Compiler(images=64)
    limit = (1000 + 100 * 64 / accum_steps) if limit < 1e9 and accum_steps > 1 else limit
    chosen, compiled = accumulation.choose(compiler, 256, 4, (limit + 1) / accumulation.HEADROOM)
    assert chosen == accum_steps
    assert compiled.accum_steps == accum_steps
    assert len(compiler.asked) <= 3


def test_takes_more_parts_when_the_line_promised_too_much():
    compiler = Compiler(images=64, curve=2)  # the line through 8 and 16 images underestimates 64
    chosen, _ = accumulation.choose(compiler, 64, 1, 10_000 / accumulation.HEADROOM)
    needed = {n: 1000 + 100 * (64 // n) + 2 * (64 // n)**2 for n in (1, 2, 4)}
    assert needed[1] > 10_000 > needed[2]
    assert chosen == 2


def test_nothing_fits():
    with pytest.raises(UserError, match='one image per device needs'):
        accumulation.choose(Compiler(images=64), 64, 1, 500)
