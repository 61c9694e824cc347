"""Descriptions of metrics."""

import dataclasses
import math

import pytest

from tests.support.errors import refused
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators.metric import Metric


def test_names_for_people_follow_from_the_name():
    metric = Metric('balanced_accuracy')
    assert (metric.words, metric.legend, metric.title) == (
        'balanced accuracy',
        'balanced accuracy',
        'Balanced accuracy',
    )
    assert Metric('x', words='mAP').title == 'MAP'
    assert Metric('x', words='mAP', legend='mean').legend == 'mean'


@pytest.mark.parametrize(
    ('unit', 'value', 'text'),
    [('percent', 0.98611, '98.61 %'), ('number', 0.43211, '0.4321'), ('count', 12360.0, '12,360')],
)
def test_values_have_the_format_of_their_unit(unit, value, text):
    assert Metric('x', unit).text(value) == text


@pytest.mark.parametrize(('best', 'better'), [('highest', 2.0), ('lowest', 1.0)])
def test_goodness_is_highest_for_the_best_value_and_lowest_for_nan(best, better):
    metric = Metric('x', best=best)
    assert max([1.0, 2.0, math.nan], key=metric.goodness) == better
    assert metric.goodness(math.nan) == -math.inf


@pytest.mark.parametrize(
    ('fields', 'value'), [({'unit': 'percents'}, 'percents'), ({'best': 'high'}, 'high')]
)
def test_unknown_units_and_directions_are_refused(fields, value):
    with refused('choice', value=value):
        Metric('x', **fields)


def test_metrics_are_shown_in_a_panel_for_enough_classes():
    assert not Metric('x').is_shown(1000)
    metric = Metric('x', panel='accuracy', least_classes=10)
    assert [metric.is_shown(count) for count in (9, 10)] == [False, True]


def test_legends_start_with_the_name_of_another_evaluator():
    metric = Metric('accuracy', panel='accuracy', legend='top-1')
    assert metric_lib.described('eval', [metric]) == {'eval/accuracy': metric}
    found = metric_lib.described('v2', [metric])['v2/accuracy']
    assert (found.legend, found.title) == ('v2: top-1', 'v2: Top-1')


def test_json_keeps_every_field():
    metric = Metric('x', 'percent', 'lowest', 'panel', 'words', 'legend', 'title', 7)
    fields = metric_lib.as_json(metric)
    assert metric_lib.from_json(fields) == metric
    assert metric_lib.from_json(fields | {'of_a_later_version': 1}) == metric
    for field in dataclasses.fields(Metric):
        with pytest.raises(ValueError, match=field.name):
            metric_lib.from_json(fields | {field.name: ['?']})
    with pytest.raises(ValueError, match='no name'):
        metric_lib.from_json({})
