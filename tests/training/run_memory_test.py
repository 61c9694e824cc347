"""The memory that a run needs apart from its training step."""

import pytest

from tests.support.resolved import resolve
from vit_jax import machine
from vit_jax.data import pipeline
from vit_jax.parallel import feeding
from vit_jax.training import accumulation, run_memory


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return resolve(tmp_path_factory.mktemp('run'))


def test_batches_read_ahead_and_the_process_take_memory(run):
    """On a CPU this includes the batches of the input pipeline; each device has its share."""
    image = 4 * 32 * 16 * 16 * 3 / 8
    assert run_memory.bytes_besides(run.program) == 0.3e9 / 8 + image * (
        feeding.BATCHES_UNDER_WAY + pipeline.BATCHES_IN_MEMORY
    )


@pytest.mark.parametrize(('limit', 'gives_back'), [(1e9, True), (9e9, False)])
def test_large_steps_keep_no_memory(limit, gives_back, run, monkeypatch):
    """malloc keeps memory in pieces: steps once took four times the compiler's figure."""
    calls = []
    monkeypatch.setattr(machine, 'give_memory_back', lambda: calls.append(True))
    monkeypatch.setattr(accumulation, 'bytes_needed', lambda compiled: 5e8)
    monkeypatch.setattr(accumulation, 'memory_limit', lambda: limit)
    run_memory.make_room(run.program)
    assert bool(calls) == gives_back
