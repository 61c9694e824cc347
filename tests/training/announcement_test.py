"""The log lines at the start of a run."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.resolved import leave_begun, resolve, write_folder
from tests.support.runs import load
from vit_jax import models
from vit_jax.training import announcement, run_data


@pytest.mark.parametrize('family', ['vit', 'hybrid', 'resnet', 'axial', 'axial_resnet'])
def test_every_parameter_is_in_one_line_of_a_kind(family):
    config = load('quickstart').get_config(family)
    model = models.build(config.model, 10)
    params = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)), train=False)
    )['params']
    total, *lines = announcement.parameter_kinds(params).splitlines()
    counts = {line.split()[0]: int(line.split()[-1].replace(',', '')) for line in lines}
    assert total == f'{sum(counts.values()):,} parameters'
    assert sum(counts.values()) == sum(x.size for x in jax.tree.leaves(params))
    assert counts['head'] == sum(x.size for x in jax.tree.leaves(params['head']))
    assert len(counts) == len(lines) <= 10


def test_frozen_parameters_and_unusual_schedules_are_logged(tmp_path, caplog):
    run = resolve(
        tmp_path,
        ema_decay=0.99,
        **{'optimizer.lr_factors': '^head/=1,.=0', 'optimizer.warmup_steps': 25},
    )
    state = run.program.initial_state()
    announcement.announce(run, state)
    head = sum(x.size for x in jax.tree.leaves(state.params['head']))
    total = sum(x.size for x in jax.tree.leaves(state.params))
    assert f'training {head:,} of {total:,} parameters' in caplog.text
    assert (
        'ema_decay 0.99 is high for 48 steps: at the end the initial weights have a share of 62 % '
        'in the average'
    ) in caplog.text
    assert 'Try 0.7917, or 0 for no average' in caplog.text
    assert (
        'optimizer.warmup_steps is 25 of 48 steps: the learning rate reaches its peak late. '
        'Try 4.' in caplog.text
    )


@pytest.mark.parametrize(
    ('train', 'evaluation', 'shared'),
    [
        ('train', 'test', False),
        ('train[:80%]', 'train[80%:]', False),
        ('train', 'train[90%:]', True),
    ],
)
def test_evaluation_on_training_images_is_a_warning(train, evaluation, shared, tmp_path, caplog):
    run = resolve(tmp_path, **{'dataset.train_split': train, 'dataset.eval_split': evaluation})
    announcement.announce(run, run.program.initial_state())
    text = (
        f'dataset.eval_split {evaluation} has images of dataset.train_split {train}: '
        'evaluations score images that the model is trained on. Use separate images: train[:90%] '
    )
    assert (text in caplog.text) == shared


def test_run_that_started_without_images_of_a_class_resumes_with_a_warning(tmp_path, caplog):
    full = {'ant': 8, 'bee': 8, 'cat': 8}
    fields = write_folder(tmp_path / 'data', {'train': full | {'cat': 0}, 'test': full})
    with pytest.MonkeyPatch().context() as patch:  # earlier versions started such runs
        patch.setattr(run_data, 'require_training_images', lambda *_: None)
        leave_begun(tmp_path, resolve(tmp_path, **fields))
    again = resolve(tmp_path, **fields)
    announcement.announce(again, again.program.initial_state())
    assert 'dataset.train_split train has no images of 1 of 3 classes: cat: the' in caplog.text


def test_a_class_without_evaluation_images_is_a_warning(tmp_path, caplog):
    full = {'ant': 8, 'bee': 8, 'cat': 8}
    fields = write_folder(tmp_path / 'data', {'train': full, 'test': full | {'bee': 0}})
    run = resolve(tmp_path, **fields)
    announcement.announce(run, run.program.initial_state())
    assert 'dataset.eval_split test has no images of 1 of 3 classes: bee: acc' in caplog.text


@pytest.mark.parametrize(
    ('balance', 'weights', 'warns'),
    [(1.0, ('balanced',), True), (1.0, (), False), (0.0, ('balanced',), False)],
)
def test_classes_that_are_balanced_twice_are_a_warning(balance, weights, warns, tmp_path, caplog):
    run = resolve(tmp_path, **{'dataset.balance': balance, 'loss.class_weights': weights})
    announcement.announce(run, run.program.initial_state())
    assert ('dataset.balance is 1 and loss.class_weights are set' in caplog.text) == warns
