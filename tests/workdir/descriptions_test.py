"""metrics.json: the descriptions of the metrics of a run."""

import json

import pytest

from vit_jax.evaluators.metric import Metric
from vit_jax.workdir import descriptions

OWN = {'balanced/balanced_accuracy': Metric('balanced_accuracy', 'percent', 'highest', 'accuracy')}
MASKED = {'masked': {'target': 'mean_color'}}


def test_written_descriptions_are_read_and_earlier_ones_stay(tmp_path):
    assert descriptions.read(str(tmp_path)) == {}
    descriptions.write(str(tmp_path), OWN)
    assert descriptions.read(str(tmp_path)) == OWN
    other = {'v2/loss': Metric('loss', best='lowest')}
    descriptions.write(str(tmp_path), other)
    assert descriptions.read(str(tmp_path)) == OWN | other


@pytest.mark.parametrize(
    'content', ['', '[]', '{"a/b": 3}', '{"a/b": {"name": "b", "unit": "miles"}}', '{"a/b": {}}']
)
def test_damaged_file_is_named_and_replaced(content, tmp_path, caplog):
    (tmp_path / descriptions.FILE).write_text(content)
    assert descriptions.read(str(tmp_path)) == {}
    assert str(tmp_path / descriptions.FILE) in caplog.text
    descriptions.write(str(tmp_path), OWN)
    assert json.loads((tmp_path / descriptions.FILE).read_text()).keys() == OWN.keys()


@pytest.mark.parametrize(
    ('name', 'best', 'panel'),
    [
        ('eval/accuracy', 'highest', 'accuracy'),
        ('eval/loss', 'lowest', 'loss'),
        ('eval/mean_average_precision', 'highest', 'accuracy'),
        ('eval/num_examples', None, ''),
        ('fewshot/25shot', 'highest', 'few-shot accuracy'),
        ('fewshot/25shot_deviation', None, ''),
        ('unknown/number', None, ''),
    ],
)
def test_workdirs_of_earlier_versions_have_the_usual_metrics(name, best, panel):
    metric = descriptions.assumed(name)
    assert (metric.best, metric.panel) == (best, panel)


@pytest.mark.parametrize(('config', 'panel'), [(MASKED, 'right colours'), ({}, 'accuracy')])
def test_accuracy_of_an_earlier_masked_patch_run_is_a_share_of_colours(config, panel, tmp_path):
    metrics = descriptions.of_names(str(tmp_path), ['eval/accuracy'], config)
    assert metrics['eval/accuracy'].panel == panel


def test_names_of_evaluations_exclude_training_and_durations():
    row = {'step': 1, 'train/loss': 1.0, 'eval/loss': 1.0, 'eval/seconds': 2.0, 'v2/loss': 1.0}
    assert descriptions.names_in([row]) == ['eval/loss', 'v2/loss']


def test_headline_is_the_first_metric_of_the_main_evaluator_with_a_best_value():
    metrics = OWN | {
        'eval/num_examples': Metric('num_examples', 'count'),
        'eval/error': Metric('error', best='lowest', panel='error'),
    }
    assert descriptions.headline(metrics) == 'eval/error'
    assert descriptions.headline(OWN) is None
