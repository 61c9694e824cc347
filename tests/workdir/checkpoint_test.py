import errno
import json
import logging
import os
import re
import resource
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.steps import setup
from vit_jax.errors import UserError
from vit_jax.workdir import checkpoint, record
from vit_jax.workdir.scores import Scores


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_identical(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture(name='state')
def _state():
    return setup(ema=True, optimizer_name='adam')[0]


def saved(
    directory,
    state,
    steps,
    keep=3,
    keep_best=False,
    metrics=None,
    name='eval/accuracy',
    keep_every=0,
):
    checkpointer = checkpoint.Checkpointer(str(directory), keep, keep_best, keep_every)
    scores = Scores(name)
    for step in steps:
        if metrics is not None:
            scores = scores.adding(step, metrics[step])
        checkpointer.save(step, state.replace(step=jnp.int32(step)), scores=scores)
    checkpointer.wait(scores)
    return checkpointer


def folders(directory):
    return sorted(os.listdir(directory / 'checkpoints'))


def data_files(directory, step):
    return sorted((directory / 'checkpoints' / str(step) / 'state' / 'd').iterdir())


def test_round_trip_is_exact_and_asynchronous_saving_survives_donation(tmp_path, state):
    state = state.replace(step=jnp.int32(3))
    expected, state = jax.tree.map(np.array, state), jax.tree.map(jnp.copy, state)
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 2, False)
    checkpointer.save(3, state)
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)(state)
    checkpointer.wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), expected)
    assert_identical(checkpointer.restore_latest(like).state, expected)


def test_nothing_saved_yet(tmp_path, state):
    assert checkpoint.Checkpointer(str(tmp_path), 2, False).restore_latest(abstract(state)) is None


def test_keeps_the_newest_and_the_best(tmp_path, state):
    accuracy = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.5, 5: 0.3}
    saved(tmp_path / 'a', state, range(1, 6), keep=2).close()
    saved(tmp_path / 'b', state, range(1, 6), keep=2, keep_best=True, metrics=accuracy).close()
    saved(tmp_path / 'c', state, range(1, 8), keep=1, keep_every=3).close()
    assert folders(tmp_path / 'a') == ['4', '5']
    assert folders(tmp_path / 'c') == ['3', '6', '7']
    assert folders(tmp_path / 'b') == ['2', '4', '5']


@pytest.mark.slow
def test_best_survives_checkpoints_without_an_evaluation(tmp_path, state):
    accuracy = {1: 0.9, 2: 0.1}
    checkpointer = saved(tmp_path, state, [1, 2], keep=1, keep_best=True, metrics=accuracy)
    for step in (3, 4):
        checkpointer.save(step, state, scores=Scores('eval/accuracy', accuracy))
    checkpointer.close()
    assert folders(tmp_path) == ['1', '4']


def test_the_best_is_named_and_found_again(tmp_path, state):
    accuracy = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.5}
    saved(tmp_path, state, [1, 2, 3, 4], keep=1, keep_best=True, metrics=accuracy).close()
    assert json.loads((tmp_path / 'best.json').read_text()) == {
        'step': 2,
        'eval/accuracy': 0.9,
        'checkpoint': 'checkpoints/2',
    }
    # A run that goes on learns the accuracies from its metrics.
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 1, True)
    scores = Scores('eval/accuracy', accuracy)
    checkpointer.save(5, state, scores=scores)
    assert checkpointer.wait(scores) == 5
    assert checkpointer.best_saved(scores) == 2
    assert folders(tmp_path) == ['2', '5']


def test_a_run_that_no_longer_keeps_its_best_names_none(tmp_path):
    (tmp_path / 'best.json').write_text('{}')
    checkpoint.Checkpointer(str(tmp_path), 1, False).close()
    assert (tmp_path / 'best.json').exists()
    for _ in range(2):
        checkpoint.forget_best(str(tmp_path))
    assert not (tmp_path / 'best.json').exists()


def test_of_losses_the_lowest_is_kept(tmp_path, state):
    loss = {1: 0.4, 2: 0.2, 3: 0.3, 4: float('nan')}
    saved(
        tmp_path, state, [1, 2, 3, 4], keep=1, keep_best=True, metrics=loss, name='eval/loss'
    ).close()
    assert folders(tmp_path) == ['2', '4']
    assert json.loads((tmp_path / 'best.json').read_text()) == {
        'step': 2,
        'eval/loss': 0.2,
        'checkpoint': 'checkpoints/2',
    }


def test_saving_says_nothing(tmp_path, state, caplog):
    """Orbax warned at every save that there were no metrics. Of a slow disk it may warn."""
    saved(tmp_path, state, [1, 2, 3], keep=1, keep_best=True, metrics={1: 0.1, 2: 0.3, 3: 0.2})
    assert not [x for x in caplog.messages if not x.startswith('Waiting for previous save')]


def test_what_is_saved_beside_the_state_returns_and_older_ones_have_nothing(tmp_path, state):
    state = state.replace(step=jnp.int32(1))
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False)
    checkpointer.save(1, state, {'sum': 0.1 + 0.2})
    checkpointer.wait()
    again = checkpoint.Checkpointer(str(tmp_path), 3, False)
    assert again.restore_latest(abstract(state)).extra == {'sum': 0.1 + 0.2}
    path = tmp_path / 'checkpoints' / '1' / 'meta' / 'metadata'
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({'fingerprint': meta['fingerprint']}))
    older = checkpoint.Checkpointer(str(tmp_path), 3, False)
    restored = older.restore_latest(abstract(state))
    assert_identical(restored.state, state)
    assert restored.extra == {}


def flip(path, offset=0):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


DAMAGES = {
    'missing': lambda path: path.unlink(),
    'null': lambda path: path.write_text('null'),
    'binary': lambda path: path.write_bytes(bytes(range(256))),
    'first bit': flip,
}


@pytest.mark.slow
def test_a_checkpoint_with_any_file_damaged_is_used_or_left_for_the_one_before(tmp_path, state):
    """Also those of the item `metrics`, which runs with keep_best wrote before."""
    saved(tmp_path / 'good', state, [1, 2]).close()
    newest = tmp_path / 'good' / 'checkpoints' / '2'
    shutil.copytree(newest / 'meta', newest / 'metrics')
    (newest / 'metrics' / 'metadata').rename(newest / 'metrics' / 'metrics')
    files = [
        '_CHECKPOINT_METADATA',
        'meta/metadata',
        'metrics/metrics',
        'state/_METADATA',
        'state/manifest.ocdbt',
    ]
    fallen_back = set()
    for file in files:
        for name, damage in DAMAGES.items():
            shutil.rmtree(tmp_path / 'run', ignore_errors=True)
            shutil.copytree(tmp_path / 'good', tmp_path / 'run')
            damage(tmp_path / 'run' / 'checkpoints' / '2' / file)
            checkpointer = checkpoint.Checkpointer(str(tmp_path / 'run'), 3, True)
            restored, step, _ = checkpointer.restore_latest(abstract(state))
            assert_identical(restored, state.replace(step=jnp.int32(step)))
            assert folders(tmp_path / 'run') == (['1', 'bad-2'] if step == 1 else ['1', '2'])
            if step == 1:
                fallen_back.add((file, name))
            checkpointer.close()
    assert {('meta/metadata', name) for name in DAMAGES} <= fallen_back
    assert {file for file, _ in fallen_back} <= {
        'meta/metadata',
        'state/_METADATA',
        'state/manifest.ocdbt',
    }


def test_no_bit_of_the_fingerprint_makes_another_version_of_the_program(tmp_path, state):
    saved(tmp_path, state, [1, 2]).close()
    path = tmp_path / 'checkpoints' / '2' / 'meta' / 'metadata'
    flip(path, path.read_text().index('.params') + 2)
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False)
    assert checkpointer.restore_latest(abstract(state)).step == 1
    assert folders(tmp_path) == ['1', 'bad-2']


def save_and_wait(checkpointer, state):
    checkpointer.save(2, state)
    checkpointer.wait()


def test_a_full_disk_is_one_message_with_the_last_good_checkpoint(tmp_path, state, limited_files):
    checkpointer = saved(tmp_path, state, [1])
    with limited_files(200), pytest.raises(UserError) as error:
        save_and_wait(checkpointer, state)
    assert re.fullmatch(
        r'the checkpoint of step 2 \(0.\d MB\) cannot be written: File too large. The last good '
        'checkpoint, of step 1, is in .*checkpoints. Mend that and run the same command again.',
        str(error.value),
    )
    other = checkpoint.Checkpointer(str(tmp_path / 'other'), 3, False)
    with limited_files(200), pytest.raises(UserError, match='No checkpoint had been written yet'):
        save_and_wait(other, state)
    # What it leaves behind is no obstacle; copied, because its threads are still at work there and
    # remove their locks.
    shutil.copytree(
        tmp_path / 'other', tmp_path / 'next', ignore=shutil.ignore_patterns('*.__lock')
    )
    assert record.begun(str(tmp_path / 'next')) is None
    checkpointer = saved(tmp_path / 'next', state, [2])
    assert checkpointer.restore_latest(abstract(state)).step == 2


@pytest.mark.filterwarnings('ignore:coroutine')  # of asyncio, which cannot make its loop
def test_a_checkpoint_is_not_blamed_for_too_few_open_files(tmp_path, state, monkeypatch):
    monkeypatch.setattr(sys, 'unraisablehook', lambda _: None)
    checkpointer = saved(tmp_path, state, [1, 2])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # of the free numbers; what is open above it stays open
    os.close(lowest)
    for spare in (0, 1, 4):  # Orbax's event loop fails, or TensorStore
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, before[1]))
        try:
            with pytest.raises(UserError, match='step 2 in .*: Too many open files. It was left'):
                checkpointer.restore_latest(abstract(state))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert checkpointer.restore_latest(abstract(state)).step == 2


@pytest.mark.parametrize('what', ['a file', 'the folder'])
def test_a_checkpoint_is_not_blamed_for_permissions(what, tmp_path, state, monkeypatch):
    checkpointer = saved(tmp_path, state, [1, 2])
    with monkeypatch.context() as patch:  # the tests may run as root, who may read all
        if what == 'a file':
            patch.setattr(os, 'access', lambda path, mode: not path.endswith('/meta/metadata'))
        else:
            scan = os.scandir

            def refused(path):
                if str(path).endswith('/2'):
                    raise PermissionError(errno.EACCES, 'Permission denied', path)
                return scan(path)

            patch.setattr(os, 'scandir', refused)
        with pytest.raises(PermissionError, match='Permission denied: .*/checkpoints/2'):
            checkpointer.restore_latest(abstract(state))
    assert folders(tmp_path) == ['1', '2']
    assert checkpointer.restore_latest(abstract(state)).step == 2


def test_room_for_what_will_be_kept_is_asked_for_first(tmp_path, state, monkeypatch):
    checkpointer = saved(tmp_path, state, [1])
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: disk._replace(free=3 * size))
    checkpointer.require_room(state, 2)
    with pytest.raises(
        UserError,
        match=r'checkpoints has 0.2 MB free and the run needs 0.\d MB '
        'more: it keeps 9 checkpoints of 0.1 MB',
    ):
        checkpointer.require_room(state, 9)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: disk._replace(free=2 * size))
    checkpointer.require_room(state, 2)
    (tmp_path / 'checkpoints/1').rename(tmp_path / 'checkpoints/bad-1')  # which stays
    with pytest.raises(UserError, match='more: it keeps 2 checkpoints'):
        checkpointer.require_room(state, 2)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: disk._replace(total=0, free=0))
    checkpointer.require_room(state, 9)


def test_a_state_that_is_saved_already_is_not_written_again(tmp_path, state):
    checkpointer = saved(tmp_path, state, [1])
    file = data_files(tmp_path, 1)[0]
    before = file.stat().st_mtime_ns
    checkpointer.save(1, state.replace(step=jnp.int32(1)))
    checkpointer.wait()
    assert file.stat().st_mtime_ns == before


def test_a_save_that_another_state_of_that_name_prevents_is_an_error(tmp_path, state):
    checkpointer = saved(tmp_path, state, [1])
    other = jax.tree.map(lambda x: x + 1, state).replace(step=jnp.int32(1))
    with pytest.raises(UserError, match=r'step 1 cannot be saved: .*checkpoints/1 exists and'):
        checkpointer.save(1, other)
    restored = checkpointer.restore_latest(abstract(state))
    assert_identical(restored.state, state.replace(step=jnp.int32(1)))


def rename(directory, *pairs):
    """Renames folders of checkpoints, all at once."""
    for old, new in pairs:
        os.rename(directory / 'checkpoints' / old, directory / 'checkpoints' / f'new-{new}')
    for _, new in pairs:
        os.rename(directory / 'checkpoints' / f'new-{new}', directory / 'checkpoints' / new)


def test_a_folder_with_the_name_of_another_step_is_not_used(tmp_path, state, caplog):
    saved(tmp_path, state, [1, 2]).close()
    rename(tmp_path, ('2', '3'))
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False)
    assert checkpointer.restore_latest(abstract(state)).step == 1
    assert folders(tmp_path) == ['1', 'bad-3']
    assert 'checkpoints/3 holds the state of step 2' in caplog.text


def test_swapped_folders_are_an_error_that_loses_nothing(tmp_path, state):
    saved(tmp_path, state, [1, 2]).close()
    rename(tmp_path, ('1', '2'), ('2', '1'))
    with pytest.raises(UserError) as error:
        checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(abstract(state))
    assert 'checkpoints/2 holds the state of step 1' in str(error.value)
    assert 'checkpoints/1 holds the state of step 2' in str(error.value)
    assert folders(tmp_path) == ['1', '2']


@pytest.mark.parametrize('harm', ['flip', 'truncate', 'empty', 'no_meta', 'device', 'pipe'])
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
    elif harm in ('device', 'pipe'):  # reading either would not end
        file = next((newest / 'state/array_metadatas').iterdir())
        file.unlink()
        file.symlink_to('/dev/zero') if harm == 'device' else os.mkfifo(file)
    else:
        for file in (newest / 'meta').iterdir():
            file.unlink()
    with caplog.at_level(logging.WARNING, logger='vit_jax'):
        restored = checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(abstract(state))
    assert restored.step == 1
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
    with pytest.raises(UserError, match=r'of another state. Only in the checkpoint: .*ema_params'):
        checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(other)
    assert folders(tmp_path) == ['1']


def test_a_checkpoint_of_a_run_with_other_fields_is_refused(tmp_path, state):
    """Such as those that no array shows."""
    state = state.replace(step=jnp.int32(1))
    fields = {'model.gelu': 'tanh', 'image_size': [8, 8]}
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False, fields=fields)
    checkpointer.save(1, state, {'sum': 1})
    checkpointer.close()
    other = checkpoint.Checkpointer(str(tmp_path), 3, False, fields=fields | {'model.gelu': 'erf'})
    with pytest.raises(UserError, match="model.gelu: 'tanh' in the checkpoint, 'erf' in this run"):
        other.restore_latest(abstract(state))
    later = checkpoint.Checkpointer(str(tmp_path), 3, False, fields=fields | {'model.newer': 0})
    restored = later.restore_latest(abstract(state))
    assert_identical(restored.state, state)
    assert restored.extra == {'sum': 1}
