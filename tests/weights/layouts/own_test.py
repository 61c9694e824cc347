"""Weights of a run: its newest readable checkpoint or a named one, averaged where there is that."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from tests.support import small
from tests.support.parameters import randomised
from tests.support.runs import resolved
from tests.support.small import assert_same_arrays
from vit_jax import config, models, weights
from vit_jax.errors import UserError
from vit_jax.training import optimizer
from vit_jax.training import state as train_state
from vit_jax.weights import files
from vit_jax.workdir import checkpoint, record

CLASSES = ('ant', 'bee', 'cat')


def make_run(path, ema):
    """A workdir as training leaves it; returns its states by step."""
    c = config.base('ti16')
    c.image_size, c.num_steps, c.dataset.name = (16, 24), 5, 'digits'
    c.model.update(hidden_size=16, num_layers=2, mlp_dim=24, num_heads=2, patch_size=(8, 8))
    c = resolved(c, 9, 3)
    model = models.build(c.model, 3)
    schedule = optimizer.make_schedule(c.optimizer, 5)
    tx = optimizer.make_optimizer(c.optimizer, schedule)
    state = jax.jit(lambda: train_state.init_state(model, tx, (16, 24, 3), 0, ema))()
    record.write(str(path), c, CLASSES)
    saver = checkpoint.Checkpointer(str(path), 3, False)
    states = {}
    for step in (2, 4):
        drawn = [randomised(model, np.zeros((1, 16, 24, 3)), seed) for seed in (step, step + 1)]
        states[step] = state.replace(params=drawn[0], ema_params=drawn[1] if ema else None)
        saver.save(step, states[step])
    saver.close()
    return states


def message(path):
    with pytest.raises(UserError) as error:
        weights.load(str(path))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize('ema', [False, True])
def test_workdir(ema, tmp_path, caplog):
    path = tmp_path / 'run'
    path.mkdir()
    states = {step: s.ema_params if ema else s.params for step, s in make_run(path, ema).items()}
    found = weights.load(str(path))
    assert_same_arrays(found.params, states[4])
    assert (found.layout, found.classes, found.num_classes) == ('workdir', list(CLASSES), 3)
    assert found.model == models.fields('ti16') | dict(
        hidden_size=16, num_layers=2, mlp_dim=24, num_heads=2, patch_size=(8, 8)
    )
    assert found.preprocess == dict(
        image_size=(16, 24),
        fit='cover',
        crop_ratio=0.875,
        resize='bilinear',
        antialias=True,
        uint8_resize=False,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    assert (found.grid(), found.loss) == ((2, 3), 'softmax')
    assert_same_arrays(weights.load(str(path / 'checkpoints/2')).params, states[2])
    assert_same_arrays(weights.load(str(path), step=2).params, states[2])
    with pytest.raises(UserError, match='2 is the checkpoint of step 2: leave out --step=4, or'):
        weights.load(str(path / 'checkpoints/2'), step=4)

    weights.save(found, tmp_path / 'x.safetensors', 'vit_jax')
    again = weights.load(str(tmp_path / 'x.safetensors'))
    assert_same_arrays(again.params, states[4])
    with pytest.raises(UserError, match='x.safetensors is not the workdir of a run.*--step=2'):
        weights.load(str(tmp_path / 'x.safetensors'), step=2)
    assert (again.model, again.classes, again.preprocess, again.loss) == (
        found.model,
        found.classes,
        found.preprocess,
        found.loss,
    )

    fingerprint = path / 'checkpoints/4/meta/metadata'  # as if a bit had flipped
    saved = json.loads(fingerprint.read_text())
    saved['fingerprint'] = {name: n + 1 for name, n in saved['fingerprint'].items()}
    fingerprint.write_text(json.dumps(saved))
    assert_same_arrays(weights.load(str(path)).params, states[2])
    assert 'the checkpoint of step 4' in caplog.text
    assert 'cannot be read: arrays differ from what was saved' in caplog.text

    assert 'no checkpoint of step 4 that can be read (there are: 2, 4)' in message(
        path / 'checkpoints/4'
    )
    (path / 'classes.json').unlink()
    assert 'classes.json cannot be read' in message(path)
    shutil.rmtree(path / 'checkpoints')
    pathlib.Path(path / 'checkpoints').mkdir()
    (path / 'classes.json').write_text('["ant", "bee", "cat"]')
    assert 'no checkpoint that can be read (there are: none)' in message(path)


def test_file_without_fields(tmp_path):
    files.write(str(tmp_path / 'x'), {'blocks/norm1/scale': np.ones((2, 3))}, '.safetensors')
    assert 'has the arrays of a vit_jax model but not its fields' in message(tmp_path / 'x')


@pytest.mark.parametrize('size', [16, [16]])
def test_a_square_may_be_one_number(size, tmp_path):
    path, given = str(tmp_path / 'x.safetensors'), small.make('no-position')
    weights.save(
        dataclasses.replace(given, preprocess=given.preprocess | {'image_size': size}),
        path,
        'vit_jax',
    )
    assert weights.load(path).image_size() == (16, 16)


@pytest.mark.parametrize(
    'change', [{'mean': None}, {'fit': None, 'antialias': None, 'uint8_resize': None}], ids=str
)
def test_what_files_of_before_do_not_say_of_images(change, tmp_path):
    """Then images kept their shape and were antialiased; null is as if nothing was said."""
    path, given = str(tmp_path / 'x.safetensors'), small.make('vit')
    weights.save(dataclasses.replace(given, preprocess=given.preprocess | change), path, 'vit_jax')
    found = weights.load(path).preprocess
    assert found == {
        name: value for name, value in given.preprocess.items() if name not in change
    } | ({'fit': 'cover', 'antialias': True, 'uint8_resize': False} if 'fit' in change else {})
