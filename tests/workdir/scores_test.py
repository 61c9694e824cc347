import math

from vit_jax.workdir import scores
from vit_jax.workdir.scores import Scores


def test_rows_without_the_metric_have_no_score():
    rows = [{'step': 1, 'train/loss': 2.0}, {'step': 1, 'eval/accuracy': 0.5}, {'step': 2}]
    assert scores.of_rows(rows, 'eval/accuracy') == Scores('eval/accuracy', {1: 0.5})


def test_ties_go_to_the_newest_and_nan_is_the_worst():
    accuracies = Scores('eval/accuracy', {1: 0.7, 2: math.nan, 3: 0.7, 4: 0.6})
    assert accuracies.best() == 3
    assert accuracies.best_of([1, 2, 4, 9]) == 1
    assert accuracies.best_of([9]) is None
    assert Scores('eval/loss', {1: 0.7, 2: 0.2, 3: math.nan}).best() == 2


def test_adding_a_score_leaves_the_old_scores_unchanged():
    before = Scores('eval/accuracy', {1: 0.7})
    after = before.adding(2, 0.7)
    assert before.values == {1: 0.7}
    assert (before.since_best(), after.since_best()) == (0, 1)
    assert Scores().since_best() == 0
