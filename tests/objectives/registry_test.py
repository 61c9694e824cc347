"""Objectives that a config names: built-in ones and functions of the user."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.extending import load_example
from tests.support.steps import SMALL, random_batch
from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.evaluators import classification
from vit_jax.objectives import losses, registry


@pytest.fixture
def my_lab(monkeypatch):
    """A module with the focal loss of docs/how-to/add-a-loss.md."""
    module = types.ModuleType('my_lab')
    load_example('my_lab/focal.py', module)
    module.nothing = lambda context: None
    module.number = 3
    monkeypatch.setitem(sys.modules, 'my_lab', module)


def config_of(**fields):
    config = config_lib.base()
    config.objective.update(fields)
    return config


@pytest.mark.parametrize('gamma', [0.0, 2.0])
def test_an_objective_of_the_user_equals_its_formula(gamma, my_lab):
    model = models.build(SMALL, 3)
    config = config_of(name='my_lab:focal', options=f'gamma={gamma}')
    objective = registry.build(config, model)
    batch = random_batch(6)
    params = model.init(jax.random.key(0), batch['image'])['params']
    value, metrics = objective.loss(params, (), batch, {'dropout': jax.random.key(1)})
    logits = np.asarray(model.apply({'params': params}, batch['image']))
    p = np.asarray(jax.nn.softmax(logits))[np.arange(6), batch['label']]
    np.testing.assert_allclose(value, -((1 - p) ** gamma * np.log(p)).mean(), rtol=1e-5)
    assert metrics == {}
    if gamma == 0:  # the cross-entropy
        plain, _ = registry.build(config_of(), model).loss(params, (), batch, {})
        np.testing.assert_allclose(value, plain, rtol=1e-6)
    expected = classification.logit_sums(
        jnp.asarray(logits), jax.tree.map(jnp.asarray, batch), losses.make_loss('softmax')
    )
    sums = objective.evaluator.sums(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums, expected)


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('labls', 'choice'),
        ('no_such_lab:focal', 'unknown'),
        ('my_lab:focall', 'unknown'),
        ('my_lab:number', 'unknown'),
        ('my_lab:nothing', 'value'),
    ],
)
def test_impossible_names_are_refused(name, kind, my_lab):
    with refused(kind, field='objective.name', value=name):
        registry.build(config_of(name=name), models.build(SMALL, 3))


@pytest.mark.parametrize(
    ('name', 'options', 'kind', 'value'),
    [
        ('my_lab:focal', 'gama=1', 'unknown', 'gama'),
        ('my_lab:focal', 'gamma=x', 'value', 'x'),
        ('my_lab:focal', 'gamma', 'value', 'gamma'),
        ('labels', 'gamma=1', 'unknown', 'gamma'),
    ],
)
def test_impossible_options_are_refused(name, options, kind, value, my_lab):
    with refused(kind, field='objective.options', value=value):
        registry.build(config_of(name=name, options=options), models.build(SMALL, 3))


@pytest.mark.parametrize(
    ('fields', 'name'),
    [
        ({}, 'labels'),
        ({'masked.target': 'pixels'}, 'masked_patches'),
        ({'teacher.weights': 'x.npz'}, 'distillation'),
        ({'teacher.weights': 'x.npz', 'objective.name': 'labels'}, 'labels'),
    ],
)
def test_other_fields_imply_an_objective(fields, name):
    assert registry.name_of(config_lib.changed(config_lib.base(), fields)) == name
