"""Results and tables of evaluators; tests/own_evaluators_test.py runs the command."""

import json

import pytest

from tests.support.errors import refused
from tests.support.runs import begin, load
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators.metric import Metric
from vit_jax.scoring import evaluators


def test_the_section_of_a_run_has_all_fields(tmp_path):
    config = load('quickstart').get_config()
    config.evals.v2 = dict(type='classification', split='val')
    begin(tmp_path, config)
    section = evaluators.section_of(str(tmp_path), 'v2')
    assert (section['type'], section['split'], section['labels']) == ('classification', 'val', '')
    with refused('unknown', field='--evals', value='v3') as error:
        evaluators.section_of(str(tmp_path), 'v3')
    assert 'Did you mean v2' in str(error.value)
    with refused('content', field='--workdir', file=tmp_path / 'no'):
        evaluators.section_of(str(tmp_path / 'no'), 'v2')


@pytest.mark.parametrize(
    ('kind', 'name'), [('knn', 'knn'), ('my_lab.balanced:balanced', 'balanced')]
)
def test_metrics_are_named_after_the_function(kind, name):
    assert evaluators.name_of(kind) == name


def test_each_metric_has_a_line_with_its_format():
    metrics = {'x/share': Metric('share', 'percent'), 'x/norm': Metric('norm')}
    result = {
        'dataset': 'digits',
        'split': 'test',
        'evaluator': 'my_lab:x',
        'x/share': 0.5,
        'x/norm': None,  # it is not finite
        'metrics': {key: metric_lib.as_json(metric) for key, metric in metrics.items()},
        'broken': ['a.png'],
    }
    lines = evaluators.table(json.loads(json.dumps(result))).splitlines()
    assert lines == ['  x/share  50.00 %', 'my_lab:x on digits, test, 1 broken image left out']
