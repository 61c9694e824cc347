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

from tests.support.errors import refused
from tests.support.steps import setup
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
    expected = jax.tree.map(np.array, state)
    state = jax.tree.map(jnp.copy, state)
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


def test_best_json_names_the_best_checkpoint_which_a_resumed_run_keeps(tmp_path, state):
    accuracy = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.5}
    saved(tmp_path, state, [1, 2, 3, 4], keep=1, keep_best=True, metrics=accuracy).close()
    assert json.loads((tmp_path / 'best.json').read_text()) == {
        'step': 2,
        'eval/accuracy': 0.9,
        'checkpoint': 'checkpoints/2',
    }
    # A resumed run reads the accuracies from its metrics.
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 1, True)
    scores = Scores('eval/accuracy', accuracy)
    checkpointer.save(5, state, scores=scores)
    assert checkpointer.wait(scores) == 5
    assert checkpointer.best_saved(scores) == 2
    assert folders(tmp_path) == ['2', '5']


def test_forget_best_removes_best_json(tmp_path):
    (tmp_path / 'best.json').write_text('{}')
    checkpoint.Checkpointer(str(tmp_path), 1, False).close()
    assert (tmp_path / 'best.json').exists()
    for _ in range(2):
        checkpoint.forget_best(str(tmp_path))
    assert not (tmp_path / 'best.json').exists()


def test_lowest_loss_is_the_best(tmp_path, state):
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


def test_saving_logs_nothing(tmp_path, state, caplog):
    """Orbax once warned at every save that there were no metrics. It may warn of a slow disk."""
    saved(tmp_path, state, [1, 2, 3], keep=1, keep_best=True, metrics={1: 0.1, 2: 0.3, 3: 0.2})
    assert not [x for x in caplog.messages if not x.startswith('Waiting for previous save')]


def test_extra_values_are_restored_and_are_empty_for_older_checkpoints(tmp_path, state):
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
def test_any_damaged_file_is_harmless_or_leads_to_the_previous_checkpoint(tmp_path, state):
    """Includes the item `metrics` of earlier versions with keep_best."""
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


def test_damaged_fingerprint_does_not_look_like_another_version_of_the_program(tmp_path, state):
    saved(tmp_path, state, [1, 2]).close()
    path = tmp_path / 'checkpoints' / '2' / 'meta' / 'metadata'
    flip(path, path.read_text().index('.params') + 2)
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False)
    assert checkpointer.restore_latest(abstract(state)).step == 1
    assert folders(tmp_path) == ['1', 'bad-2']


def save_and_wait(checkpointer, state):
    checkpointer.save(2, state)
    checkpointer.wait()


def test_full_disk_is_one_message_with_the_last_good_checkpoint(tmp_path, state, limited_files):
    checkpointer = saved(tmp_path, state, [1])
    with limited_files(200), refused(kind='unwritable', file=tmp_path / 'checkpoints') as error:
        save_and_wait(checkpointer, state)
    assert re.fullmatch(
        r'the checkpoint of step 2 \(0.\d MB\) cannot be written: File too large. The last good '
        'checkpoint, of step 1, is in .*checkpoints. Fix the cause and run the same command again.',
        str(error.value),
    )
    other = checkpoint.Checkpointer(str(tmp_path / 'other'), 3, False)
    with limited_files(200), refused(kind='unwritable') as error:
        save_and_wait(other, state)
    assert 'No checkpoint had been written yet' in str(error.value)
    # A new run can use the files of the failed save. They are copied, because threads of the failed
    # save still remove their locks.
    shutil.copytree(
        tmp_path / 'other', tmp_path / 'next', ignore=shutil.ignore_patterns('*.__lock')
    )
    assert record.begun(str(tmp_path / 'next')) is None
    checkpointer = saved(tmp_path / 'next', state, [2])
    assert checkpointer.restore_latest(abstract(state)).step == 2


@pytest.mark.filterwarnings('ignore:coroutine')  # asyncio cannot create its event loop
def test_too_few_open_files_is_not_a_damaged_checkpoint(tmp_path, state, monkeypatch):
    monkeypatch.setattr(sys, 'unraisablehook', lambda _: None)
    checkpointer = saved(tmp_path, state, [1, 2])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the lowest free number; files with higher numbers stay open
    os.close(lowest)
    for spare in (0, 1, 4):  # Orbax's event loop fails, or TensorStore
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, before[1]))
        try:
            with refused(kind='resource') as error:
                checkpointer.restore_latest(abstract(state))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert re.match('the checkpoint of step 2 in .*: Too many open files', str(error.value))
    assert checkpointer.restore_latest(abstract(state)).step == 2


@pytest.mark.parametrize('denied', ['a file', 'the folder'])
def test_missing_permission_is_not_a_damaged_checkpoint(denied, tmp_path, state, monkeypatch):
    checkpointer = saved(tmp_path, state, [1, 2])
    with monkeypatch.context() as patch:  # the tests may run as root, who may read everything
        if denied == 'a file':
            patch.setattr(os, 'access', lambda path, mode: not path.endswith('/meta/metadata'))
        else:
            scan = os.scandir

            def denied_scan(path):
                if str(path).endswith('/2'):
                    raise PermissionError(errno.EACCES, 'Permission denied', path)
                return scan(path)

            patch.setattr(os, 'scandir', denied_scan)
        with pytest.raises(PermissionError, match='Permission denied: .*/checkpoints/2'):
            checkpointer.restore_latest(abstract(state))
    assert folders(tmp_path) == ['1', '2']
    assert checkpointer.restore_latest(abstract(state)).step == 2


def test_run_needs_disk_space_for_all_kept_checkpoints(tmp_path, state, monkeypatch):
    checkpointer = saved(tmp_path, state, [1])
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: disk._replace(free=3 * size))
    checkpointer.require_room(state, 2)
    with refused(kind='resource', file=tmp_path / 'checkpoints') as error:
        checkpointer.require_room(state, 9)
    assert re.search(
        r'checkpoints has 0.2 MB free and the run needs 0.\d MB more: it keeps 9 checkpoints of '
        '0.1 MB while it writes the next one',
        str(error.value),
    )
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: disk._replace(free=2 * size))
    checkpointer.require_room(state, 2)
    (tmp_path / 'checkpoints/1').rename(tmp_path / 'checkpoints/bad-1')  # it is never removed
    with refused(kind='resource'):
        checkpointer.require_room(state, 2)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: disk._replace(total=0, free=0))
    checkpointer.require_room(state, 9)


def test_saved_state_is_not_written_again(tmp_path, state):
    checkpointer = saved(tmp_path, state, [1])
    file = data_files(tmp_path, 1)[0]
    before = file.stat().st_mtime_ns
    checkpointer.save(1, state.replace(step=jnp.int32(1)))
    checkpointer.wait()
    assert file.stat().st_mtime_ns == before


def test_another_state_of_a_saved_step_is_an_error(tmp_path, state):
    checkpointer = saved(tmp_path, state, [1])
    other = jax.tree.map(lambda x: x + 1, state).replace(step=jnp.int32(1))
    with refused(kind='conflict', file=tmp_path / 'checkpoints/1'):
        checkpointer.save(1, other)
    restored = checkpointer.restore_latest(abstract(state))
    assert_identical(restored.state, state.replace(step=jnp.int32(1)))


def rename(directory, *pairs):
    """Renames folders of checkpoints simultaneously."""
    for old, new in pairs:
        os.rename(directory / 'checkpoints' / old, directory / 'checkpoints' / f'new-{new}')
    for _, new in pairs:
        os.rename(directory / 'checkpoints' / f'new-{new}', directory / 'checkpoints' / new)


def test_renamed_checkpoint_is_not_used(tmp_path, state, caplog):
    saved(tmp_path, state, [1, 2]).close()
    rename(tmp_path, ('2', '3'))
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False)
    assert checkpointer.restore_latest(abstract(state)).step == 1
    assert folders(tmp_path) == ['1', 'bad-3']
    assert 'checkpoints/3 contains the state of step 2' in caplog.text


def test_swapped_checkpoints_are_an_error_that_loses_nothing(tmp_path, state):
    saved(tmp_path, state, [1, 2]).close()
    rename(tmp_path, ('1', '2'), ('2', '1'))
    with refused(kind='unreadable', file=tmp_path / 'checkpoints') as error:
        checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(abstract(state))
    assert 'checkpoints/2 contains the state of step 1' in str(error.value)
    assert 'checkpoints/1 contains the state of step 2' in str(error.value)
    assert folders(tmp_path) == ['1', '2']


@pytest.mark.parametrize('damage', ['flip', 'truncate', 'empty', 'no_meta', 'device', 'pipe'])
def test_falls_back_and_renames_the_bad_checkpoint(damage, tmp_path, state, caplog):
    saved(tmp_path, state, [1, 2]).close()
    newest = tmp_path / 'checkpoints' / '2'
    if damage == 'flip':
        largest = max(data_files(tmp_path, 2), key=lambda f: f.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 4
        largest.write_bytes(content)
    elif damage == 'truncate':
        for file in data_files(tmp_path, 2):
            file.write_bytes(file.read_bytes()[:50])
    elif damage == 'empty':
        os.rename(newest, tmp_path.parent / f'elsewhere_{damage}_{tmp_path.name}')
        newest.mkdir()
    elif damage in ('device', 'pipe'):  # reading either would not end
        file = next((newest / 'state/array_metadatas').iterdir())
        file.unlink()
        if damage == 'device':
            file.symlink_to('/dev/zero')
        else:
            os.mkfifo(file)
    else:
        for file in (newest / 'meta').iterdir():
            file.unlink()
    with caplog.at_level(logging.WARNING, logger='vit_jax'):
        restored = checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(abstract(state))
    assert restored.step == 1
    assert folders(tmp_path) == ['1', 'bad-2']
    assert 'checkpoint of step 2 cannot be used and is now' in caplog.text
    assert 'falling back to the checkpoint of step 1' in caplog.text


def test_no_readable_checkpoint_is_an_error_that_loses_nothing(tmp_path, state):
    saved(tmp_path, state, [1, 2]).close()
    for step in (1, 2):
        for file in data_files(tmp_path, step):
            file.write_bytes(b'')
    with refused(kind='unreadable', file=tmp_path / 'checkpoints'):
        checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(abstract(state))
    assert folders(tmp_path) == ['1', '2']


def test_another_state_is_not_a_damaged_checkpoint(tmp_path, state):
    saved(tmp_path, state, [1]).close()
    other = abstract(state.replace(ema_params=None))
    with refused(kind='conflict', file=tmp_path / 'checkpoints/1') as error:
        checkpoint.Checkpointer(str(tmp_path), 3, False).restore_latest(other)
    assert re.search('another state. Only in the checkpoint: .*ema_params', str(error.value))
    assert folders(tmp_path) == ['1']


def test_checkpoint_of_a_run_with_other_fields_is_refused(tmp_path, state):
    """The names and shapes of the arrays do not depend on these fields."""
    state = state.replace(step=jnp.int32(1))
    fields = {'model.gelu': 'tanh', 'image_size': [8, 8]}
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False, fields=fields)
    checkpointer.save(1, state, {'sum': 1})
    checkpointer.close()
    other = checkpoint.Checkpointer(str(tmp_path), 3, False, fields=fields | {'model.gelu': 'erf'})
    lines = ["model.gelu: 'tanh' in the checkpoint, 'erf' in this run"]
    with refused(kind='conflict', file=tmp_path / 'checkpoints/1', value=lines):
        other.restore_latest(abstract(state))
    later = checkpoint.Checkpointer(str(tmp_path), 3, False, fields=fields | {'model.newer': 0})
    restored = later.restore_latest(abstract(state))
    assert_identical(restored.state, state)
    assert restored.extra == {'sum': 1}
