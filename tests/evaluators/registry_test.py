"""Evaluators that a config names: built-in ones and functions of the user."""

import sys
import types

import jax
import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score

from tests.support.errors import refused
from tests.support.extending import load_example
from tests.support.steps import SMALL, random_batch
from vit_jax import models
from vit_jax.evaluators import registry
from vit_jax.evaluators.context import Context, Devices, Split
from vit_jax.evaluators.evaluator import Evaluator, SumEvaluator, never
from vit_jax.objectives import losses
from vit_jax.objectives.objective import all_parameters
from vit_jax.options import Options
from vit_jax.parallel import sharding

NAMES = ('ant', 'bee', 'cat')


@pytest.fixture
def my_lab(monkeypatch):
    """A module with the evaluators of docs/how-to/add-a-metric.md."""
    module = types.ModuleType('my_lab')
    load_example('my_lab/balanced.py', module)
    load_example('my_lab/norms.py', module)
    module.nothing = lambda context: None
    monkeypatch.setitem(sys.modules, 'my_lab', module)


def context_of(batches=(), options='', classes=NAMES, pair=()):
    """The context of a small model with images of three classes, on one device."""
    mesh = sharding.make_mesh({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
    model = models.build(SMALL, len(classes))
    source = types.SimpleNamespace(class_names=classes, multi_label=False, labels=None)
    return Context(
        name='evals.mine',
        options=Options('evals.mine.options', options),
        class_names=classes,
        encoder=model,
        encoder_params=all_parameters,
        loss=losses.make_evaluation_loss('softmax'),
        devices=Devices(mesh, model.backend, 1),
        open_test=lambda: Split(source, list(batches), 'test'),
        open_pair=lambda: tuple(Split(source, list(each), 'train') for each in pair),
    )


def params_of(context):
    image = random_batch(2)['image']
    params = context.encoder.init(jax.random.key(0), image)['params']
    params['head']['kernel'] = jax.random.normal(jax.random.key(1), params['head']['kernel'].shape)
    return params


def masked_batch(seed, left_out):
    batch = random_batch(8, seed)
    mask = np.ones(8, bool)
    mask[left_out] = False
    batch['image'][left_out] = np.nan
    return batch | {'mask': mask}


def answers(context, params, batches):
    """Labels and predicted classes of the unmasked images."""
    labels = np.concatenate([batch['label'][batch['mask']] for batch in batches])
    images = np.concatenate([batch['image'][batch['mask']] for batch in batches])
    logits = context.encoder.apply({'params': params}, images)
    return labels, np.asarray(logits).argmax(-1)


def test_a_metric_of_the_user_equals_its_formula(my_lab):
    batches = [masked_batch(0, [3]), masked_batch(1, [0, 7])]
    context = context_of(batches)
    params = params_of(context)
    made = registry.build('my_lab:balanced', 'evals.mine.type', context)
    found = context.evaluator(made).run(params, never)
    labels, predicted = answers(context, params, batches)
    assert found == {'balanced_accuracy': pytest.approx(balanced_accuracy_score(labels, predicted))}
    assert context.evaluator(made).run(params, lambda: True) is None


def test_an_evaluator_of_the_user_is_used_unchanged(my_lab):
    context = context_of()
    made = registry.build('my_lab:norms', 'evals.mine.type', context)
    params = {'a': np.array([3.0, 0.0]), 'b': np.array([4.0])}
    assert context.evaluator(made) is made
    assert made.run(params, never) == {'parameters': 5.0}


def test_classification_is_accuracy_and_loss():
    batches = [masked_batch(0, [3])]
    context = context_of(batches)
    params = params_of(context)
    made = registry.build('classification', 'evals.mine.type', context)
    assert isinstance(made, SumEvaluator)
    found = context.evaluator(made).run(params, never)
    labels, predicted = answers(context, params, batches)
    assert found['accuracy'] == np.mean(labels == predicted)
    assert found['num_examples'] == 7


@pytest.mark.parametrize('kind', ['knn', 'linear_probe', 'fewshot'])
def test_classifiers_of_frozen_features_return_their_metrics(kind):
    batch = random_batch(8) | {'mask': np.ones(8, bool)}
    batch['label'] = np.array([0, 1, 2, 0, 1, 2, 0, 1], np.int32)
    options = 'shots=1 2,seeds=2' if kind == 'fewshot' else ''
    context = context_of(options=options, pair=([batch], [batch]))
    made = registry.build(kind, 'evals.mine.type', context)
    assert isinstance(made, Evaluator)
    found = made.run(params_of(context), never)
    names = ['1shot', '2shot'] if kind == 'fewshot' else ['accuracy']
    assert set(names) <= found.keys()
    assert set(found) == {metric.name for metric in made.metrics}
    assert all(0 <= found[name] <= 1 for name in names)
    assert made.run(params_of(context), lambda: True) is None


@pytest.mark.parametrize(
    ('name', 'options', 'kind', 'value'),
    [
        ('clasification', '', 'choice', 'clasification'),
        ('no_such_lab:x', '', 'unknown', 'no_such_lab:x'),
        ('my_lab:nothing', '', 'value', 'my_lab:nothing'),
        ('my_lab:balanced', 'x=1', 'unknown', 'x'),
        ('fewshot', 'shots=1;5', 'value', '1;5'),
        ('fewshot', 'shots=0', 'value', '0'),
        ('knn', 'representation=cls', 'choice', 'cls'),
    ],
)
def test_impossible_names_and_options_are_refused(name, options, kind, value, my_lab):
    batch = random_batch(8) | {'mask': np.ones(8, bool)}
    context = context_of(options=options, pair=([batch], [batch]))
    with refused(kind, value=value):
        registry.build(name, 'evals.mine.type', context)


def test_a_model_without_a_head_is_scored_by_its_features_only():
    context = context_of(classes=())
    with refused('inapplicable'):
        registry.build('classification', 'evals.mine.type', context)
