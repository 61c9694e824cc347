"""Scores: the metric that ranks the runs of a campaign."""

import json

from tests.support.runs import load
from vit_jax.campaigns import scores
from vit_jax.evaluators.metric import Metric
from vit_jax.workdir import descriptions


def test_last_score_is_of_the_last_evaluation(tmp_path):
    rows = [
        {'step': 1, 'eval/accuracy': 0.5},
        {'step': 2, 'eval/accuracy': 0.25},
        {'step': 3, 'train/loss': 1.0},
    ]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    assert scores.last_score(str(tmp_path), 'eval/accuracy') == 0.25


def test_ranking_is_the_best_metric_as_the_workdir_describes_it(tmp_path):
    config = load('quickstart').get_config()
    assert scores.ranking(str(tmp_path), config) == scores.ACCURACY
    config.best_metric = 'mine/distance'
    distance = Metric('distance', best='lowest', panel='distance')
    descriptions.write(str(tmp_path), {'mine/distance': distance})
    ranking = scores.ranking(str(tmp_path), config)
    assert ranking == ('mine/distance', distance)
    assert ranking.key == 'mine_distance'


def test_accuracy_is_the_key_of_the_default():
    assert scores.ACCURACY.key == 'accuracy'
    assert scores.ACCURACY.text(0.5, 'diverges') == '50.00 %'
    assert scores.ACCURACY.text(None, 'diverges') == 'diverges'
