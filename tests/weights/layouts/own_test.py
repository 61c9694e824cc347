"""Weights of a run: its newest readable checkpoint or a named one, averages where it has them."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small
from tests.support.errors import refused
from tests.support.marks import nightly_but
from tests.support.parameters import randomised
from tests.support.runs import resolved
from tests.support.small import assert_same_arrays
from vit_jax import config, convert, models, weights
from vit_jax.errors import UserError
from vit_jax.training import optimizer
from vit_jax.training import state as train_state
from vit_jax.weights import array_files
from vit_jax.workdir import checkpoint, record

CLASSES = ('ant', 'bee', 'cat')


def make_run(path, ema, with_fields=True):
    """Writes a workdir like training; returns its states by step.

    `with_fields`: whether checkpoints have the fields of the model, which earlier versions lacked.
    """
    c = config.base('ti16')
    c.image_size, c.num_steps, c.dataset.name = (16, 24), 5, 'digits'
    c.model.update(hidden_size=16, num_layers=2, mlp_dim=24, num_heads=2, patch_size=(8, 8))
    c = resolved(c, 9, 3)
    model = models.build(c.model, 3)
    schedule = optimizer.make_schedule(c.optimizer, 5)
    tx = optimizer.make_optimizer(c.optimizer, schedule)
    state = jax.jit(lambda: train_state.init_state(model, tx, (16, 24, 3), 0, ema))()
    record.write(str(path), c, CLASSES)
    fields = config.of_weights(c) if with_fields else None
    saver = checkpoint.Checkpointer(str(path), 3, False, fields=fields)
    states = {}
    for step in (2, 4):
        drawn = [randomised(model, np.zeros((1, 16, 24, 3)), seed) for seed in (step, step + 1)]
        states[step] = state.replace(
            step=jnp.int32(step), params=drawn[0], ema_params=drawn[1] if ema else None
        )
        saver.save(step, states[step])
    saver.close()
    return states


def message(path):
    with pytest.raises(UserError) as error:
        weights.load(str(path))
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize('ema', [False, True])
def test_weights_of_a_workdir(ema, tmp_path, caplog):
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
    with refused('value', field='--step', file=path / 'checkpoints/2', value=4):
        weights.load(str(path / 'checkpoints/2'), step=4)

    weights.save(found, tmp_path / 'x.safetensors', 'vit_jax')
    again = weights.load(str(tmp_path / 'x.safetensors'))
    assert_same_arrays(again.params, states[4])
    with refused('inapplicable', field='--step', file=tmp_path / 'x.safetensors', value=2):
        weights.load(str(tmp_path / 'x.safetensors'), step=2)
    assert (again.model, again.classes, again.preprocess, again.loss) == (
        found.model,
        found.classes,
        found.preprocess,
        found.loss,
    )

    fingerprint = path / 'checkpoints/4/meta/metadata'  # as if a bit had flipped
    saved = json.loads(fingerprint.read_text())
    saved['fingerprint'] = {name: n + (name != '.step') for name, n in saved['fingerprint'].items()}
    fingerprint.write_text(json.dumps(saved))
    assert_same_arrays(weights.load(str(path)).params, states[2])
    assert 'the checkpoint of step 4' in caplog.text
    assert 'cannot be read: arrays differ from the saved ones' in caplog.text

    assert 'no checkpoint of step 4 that can be read (there are: 2, 4)' in message(
        path / 'checkpoints/4'
    )
    (path / 'classes.json').unlink()
    assert 'classes.json cannot be read' in message(path)
    shutil.rmtree(path / 'checkpoints')
    pathlib.Path(path / 'checkpoints').mkdir()
    (path / 'classes.json').write_text('["ant", "bee", "cat"]')
    assert 'no checkpoint that can be read (there are: none)' in message(path)


EDITS = {
    'model.num_heads': 4,
    'model.num_layers': 3,
    'model.hidden_size': 32,
    'model.mlp_dim': 48,
    'model.patch_size': [4, 4],
    'model.pool': 'gap',
    'model.gelu': 'erf',
    'model.layer_norm_epsilon': 1e-3,
    'model.norm_after_pool': True,
    'dataset.num_classes': 4,
    'image_size': [24, 16],
    'loss.name': 'sigmoid',
    'preprocess.fit': 'squash',
}
# Fields that arrays show, fields that they do not show, and a field of each section.
EVERY_KIND = (
    'model.num_heads',
    'model.hidden_size',
    'model.gelu',
    'dataset.num_classes',
    'image_size',
    'preprocess.fit',
)
NOT_SHOWN = (
    'model.gelu',
    'model.layer_norm_epsilon',
    'model.norm_after_pool',
    'image_size',
    'loss.name',
    'preprocess.fit',
)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Workdirs by whether their checkpoints state the fields of the model."""
    made = {}
    for with_fields in (True, False):
        path = tmp_path_factory.mktemp('run') / 'run'
        path.mkdir()
        make_run(path, False, with_fields)
        made[with_fields] = path
    return made


def edited(run, path, change):
    """A copy of a workdir, with `change` applied to its config."""
    shutil.copytree(run, path)
    values = json.loads((path / 'config.json').read_text())
    change(values)
    (path / 'config.json').write_text(json.dumps(values))
    return path


@pytest.mark.parametrize('field', nightly_but(EVERY_KIND, EDITS))
def test_a_config_of_another_model_is_refused_with_its_field(field, runs, tmp_path):
    *sections, name = field.split('.')

    def change(values):
        for section in sections:
            values = values[section]
        values[name] = EDITS[field]

    text = message(edited(runs[True], tmp_path / 'new', change))
    assert 'config.json describes another model' in text
    assert f'{field}: {EDITS[field]!r} in the file' in text
    if field not in NOT_SHOWN:  # arrays are compared with a checkpoint of an earlier version
        old = edited(runs[False], tmp_path / 'old', change)
        assert f'{old}/config.json and {old}/checkpoints/4: ' in message(old)


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (lambda values: values.update(model={}), 'missing model.patch_size, model.num_layers,'),
        (lambda values: values['model'].pop('num_heads'), 'missing model.num_heads'),
        (lambda values: values['model'].pop('gelu'), "model.gelu: 'absent' in the file"),
        (lambda values: values['model'].update(num_heads='2'), "model.num_heads is '2': expected"),
        (lambda values: values['model'].update(heads=2), 'model.heads is not a field'),
        (lambda values: values['model'].update(resnet=2), 'model.resnet is not a field'),
        (lambda values: values.update(image_size=[0, 8]), 'image_size is [0, 8]: expected'),
    ],
)
def test_a_config_without_a_model_is_refused(change, expected, runs, tmp_path):
    assert expected in message(edited(runs[True], tmp_path / 'run', change))


def test_a_workdir_with_a_config_of_another_model_is_not_converted(runs, tmp_path):
    path = edited(runs[False], tmp_path / 'run', lambda c: c['dataset'].update(num_classes=4))
    target = tmp_path / 'x.safetensors'
    assert convert.main([str(path), str(target), '--to=vit_jax']) == 1
    assert not target.exists()


def test_a_file_without_fields_is_refused(tmp_path):
    array_files.write(str(tmp_path / 'x'), {'blocks/norm1/scale': np.ones((2, 3))}, '.safetensors')
    with refused('missing', file=tmp_path / 'x'):
        weights.load(str(tmp_path / 'x'))


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
def test_files_of_earlier_versions_have_their_preprocessing(change, tmp_path):
    """Images kept their shape and were antialiased; null means that a value is not stated."""
    path, given = str(tmp_path / 'x.safetensors'), small.make('vit')
    weights.save(dataclasses.replace(given, preprocess=given.preprocess | change), path, 'vit_jax')
    found = weights.load(path).preprocess
    assert found == {
        name: value for name, value in given.preprocess.items() if name not in change
    } | ({'fit': 'cover', 'antialias': True, 'uint8_resize': False} if 'fit' in change else {})
