import json
import os

import jax.numpy as jnp
import pytest

from tests.support.errors import refused
from tests.support.runs import resolved
from tests.support.steps import setup
from vit_jax import config as config_lib
from vit_jax.workdir import checkpoint, record, saved_params


@pytest.mark.parametrize(
    ('keep_best', 'name'), [(True, 'eval/accuracy'), (True, 'eval/loss'), (False, 'eval/accuracy')]
)
def test_best_checkpoint_is_loaded_if_the_run_keeps_it(keep_best, name, tmp_path, caplog):
    state = setup(ema=True, optimizer_name='adam')[0]
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False)
    for step in (1, 2, 3):
        checkpointer.save(step, state.replace(step=jnp.int32(step)))
    checkpointer.close()
    config = config_lib.base()
    config.update(num_steps=3, keep_best=keep_best, best_metric=name)
    record.write(str(tmp_path), resolved(config), ['ant'])
    metrics = tmp_path / 'metrics.jsonl'
    metrics.write_text(
        ''.join(
            json.dumps({'step': step, name: 1 - score if 'loss' in name else score}) + '\n'
            for step, score in [(1, 0.5), (2, 0.9), (3, 0.8), (4, 0.95)]
        )
    )
    assert saved_params.load_params(str(tmp_path))[1] == (2 if keep_best else 3)
    score = 'eval/loss 0.1000' if 'loss' in name else 'eval/accuracy 0.9000'
    message = (
        f'using the best checkpoint, of step 2 ({score}). Another one: {tmp_path}/checkpoints/STEP'
    )
    assert (message in caplog.text) == keep_best
    assert saved_params.load_params(str(tmp_path), 1)[1] == 1
    os.mkfifo(tmp_path / 'checkpoints/2/state/pipe')
    assert saved_params.load_params(str(tmp_path))[1] == 3
    metrics.write_text('null')
    assert saved_params.load_params(str(tmp_path))[1] == 3
    with refused(kind='missing', file=tmp_path, value=7) as error:
        saved_params.load_params(str(tmp_path), 7)
    assert str(error.value) == (
        f'{tmp_path} has no checkpoint of step 7 that can be read (there are: 1, 2, 3).'
    )


def test_renamed_checkpoint_is_an_error(tmp_path):
    state = setup(optimizer_name='adam')[0]
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 3, False)
    for step in (1, 2):
        checkpointer.save(step, state.replace(step=jnp.int32(step)))
    checkpointer.close()
    config = config_lib.base()
    config.num_steps = 2
    record.write(str(tmp_path), resolved(config), ['ant'])
    os.rename(tmp_path / 'checkpoints' / '2', tmp_path / 'checkpoints' / '3')
    for step in (3, None):
        with refused(kind='content', file=tmp_path / 'checkpoints/3', value=3) as error:
            saved_params.load_params(str(tmp_path), step)
        assert 'checkpoints/3 contains the state of step 2' in str(error.value)
    assert saved_params.load_params(str(tmp_path), 1)[1] == 1


def test_checkpoints_are_listed_again_if_the_run_removes_them(tmp_path, monkeypatch, caplog):
    state = setup(optimizer_name='adam')[0]
    checkpointer = checkpoint.Checkpointer(str(tmp_path), 1, False)
    checkpointer.save(4, state.replace(step=jnp.int32(4)))
    checkpointer.close()
    record.write(
        str(tmp_path), resolved(config_lib.changed(config_lib.base(), {'num_steps': 9})), ['ant']
    )
    listings = [[2, 3]]  # before the run saved step 4
    listed_now = record.saved_steps
    monkeypatch.setattr(
        record, 'saved_steps', lambda folder: listings.pop() if listings else listed_now(folder)
    )
    assert saved_params.load_params(str(tmp_path))[1] == 4
    assert not [x for x in caplog.records if x.levelname == 'WARNING']
    listings.append([2])
    with refused(kind='unreadable', file=tmp_path, value=2) as error:
        saved_params.load_params(str(tmp_path), 2)
    assert '(there are: 4)' in str(error.value)
