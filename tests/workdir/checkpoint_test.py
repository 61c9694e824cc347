import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.support.steps import setup
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.training import sharding
from vit_jax.workdir import checkpoint


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                        state)


def assert_identical(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(name='state')
def _state():
    return setup(ema=True, optimizer_name='adam')[0]


def saved(directory, state, steps, keep=3, keep_best=False, metrics=None):
    checkpointer = checkpoint.Checkpointer(str(directory), keep, keep_best)
    for step in steps:
        value = None if metrics is None else {'eval/accuracy': metrics[step]}
        checkpointer.save(step, state.replace(step=jnp.int32(step)), value)
    checkpointer.wait()
    return checkpointer


def folders(directory):
    return sorted(os.listdir(directory / 'checkpoints'))


def data_files(directory, step):
    return sorted((directory / 'checkpoints' / str(step) / 'state' / 'd').iterdir())


def test_round_trip_is_exact_and_asynchronous_saving_survives_donation(tmp_path, state):
    expected = jax.tree.map(np.array, state)
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 2, False)
    checkpointer.save(3, state)
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)(state)
    checkpointer.wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), expected)
    assert_identical(checkpointer.restore_latest(like), expected)


def test_nothing_saved_yet(tmp_path, state):
    assert checkpoint.Checkpointer(str(tmp_path), 2, False).restore_latest(abstract(state)) is None


def test_keeps_the_newest_and_the_best(tmp_path, state):
    accuracy = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.5, 5: 0.3}
    saved(tmp_path / 'a', state, range(1, 6), keep=2).close()
    saved(tmp_path / 'b', state, range(1, 6), keep=2, keep_best=True, metrics=accuracy).close()
    assert folders(tmp_path / 'a') == ['4', '5']
    assert folders(tmp_path / 'b') == ['2', '4', '5']


def test_best_survives_checkpoints_without_an_evaluation(tmp_path, state):
    checkpointer = saved(tmp_path, state, [1, 2], keep=1, keep_best=True, metrics={1: .9, 2: .1})
    checkpointer.save(3, state)
    checkpointer.save(4, state)
    checkpointer.close()
    assert folders(tmp_path) == ['1', '4']


def test_a_step_that_is_there_is_not_written_again(tmp_path, state):
    checkpointer = saved(tmp_path, state, [1])
    checkpointer.save(1, jax.tree.map(lambda x: x + 1, state))
    checkpointer.wait()
    assert_identical(checkpointer.restore_latest(abstract(state)), state.replace(step=jnp.int32(1)))


@pytest.mark.parametrize('harm', ['flip', 'truncate', 'empty', 'no_meta'])
def test_falls_back_and_keeps_the_bad_one(harm, tmp_path, state, caplog):
    saved(tmp_path, state, [1, 2]).close()
    newest = tmp_path / 'checkpoints' / '2'
    if harm == 'flip':
        largest = max(data_files(tmp_path, 2), key=lambda f: f.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 4
        largest.write_bytes(content)
    elif harm == 'truncate':
        for file in data_files(tmp_path, 2):
            file.write_bytes(file.read_bytes()[:50])
    elif harm == 'empty':
        os.rename(newest, tmp_path.parent / f'elsewhere_{harm}_{tmp_path.name}')
        newest.mkdir()
    else:
        for file in (newest / 'meta').iterdir():
            file.unlink()
    with caplog.at_level(logging.WARNING, logger='vit_jax'):
        restored = checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(abstract(state))
    assert int(restored.step) == 1
    assert folders(tmp_path) == ['1', 'bad-2']
    assert 'checkpoint of step 2 cannot be used and is now' in caplog.text
    assert 'falling back to the checkpoint of step 1' in caplog.text


def test_all_bad_is_an_error_that_loses_nothing(tmp_path, state):
    saved(tmp_path, state, [1, 2]).close()
    for step in (1, 2):
        for file in data_files(tmp_path, step):
            file.write_bytes(b'')
    with pytest.raises(UserError, match='none of the checkpoints in .* can be read'):
        checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(abstract(state))
    assert folders(tmp_path) == ['1', '2']


def test_another_state_is_not_taken_for_a_damaged_one(tmp_path, state):
    saved(tmp_path, state, [1]).close()
    other = abstract(state.replace(ema_params=None))
    with pytest.raises(UserError, match=r"of another state. Only in the checkpoint: .*ema_params"):
        checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(other)
    assert folders(tmp_path) == ['1']


def test_fingerprint_sees_every_bit_and_the_order():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5)).astype(np.float32)
    base = int(checkpoint.fingerprint(jnp.asarray(x)))
    for element in range(15):
        for bit in range(32):
            bits = x.copy().view(np.uint32)
            bits.reshape(-1)[element] ^= np.uint32(1) << np.uint32(bit)
            assert int(checkpoint.fingerprint(jnp.asarray(bits.view(np.uint32)))) != base
    assert int(checkpoint.fingerprint(jnp.asarray(x.view(np.uint32)))) == base
    assert int(checkpoint.fingerprint(jnp.asarray(x[::-1]))) != base


def test_fingerprint_is_the_same_on_any_mesh():
    x = jax.random.normal(jax.random.key(0), (8, 12))
    mesh = sharding.make_mesh(config_lib.base().mesh)
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))
    assert int(checkpoint.fingerprint(spread)) == int(checkpoint.fingerprint(x))
    # bfloat16 and integers are summed likewise
    assert int(checkpoint.fingerprint(x.astype('bfloat16'))) != 0
