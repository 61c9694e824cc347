"""Short runs choose the learning rate of the long run."""

import time

import pytest

from tests.fitting.tries_test import setup_of
from vit_jax.fitting import budget, record, training, tries
from vit_jax.fitting.tries import Score

PLAN = budget.Plan((16, 16), 8, 1, 1.0, 10.0, 20, 100, (0.001, 0.003, 0.01), True)
LONG = 1e6  # seconds
PROBE = Score(0.5, 1.0)


class Runs:
    """Stands for training: runs have the scores of a table."""

    def __init__(self, scores, code=0):
        self.scores = scores
        self.code = code
        self.trained = []

    def __call__(self, setup, changes, workdir):
        name = workdir.rpartition('/')[2]
        self.trained.append((name, changes))
        if self.code:
            return self.code, None
        return 0, self.scores.get(name, Score(0.2, 3.0))


@pytest.fixture
def train(tmp_path, monkeypatch, data):
    def run(runs, plan=PLAN, seconds=LONG):
        monkeypatch.setattr(tries, 'train', runs)
        stages = record.Record(str(tmp_path), {'data': 'x'})
        end = time.monotonic() + seconds
        return training.train(str(tmp_path), stages, setup_of(), plan, data, PROBE, end)

    return run


@pytest.fixture
def data():
    class Photos:
        def part(self, split):
            return range(80)

    return Photos()


SCORES = {
    'lr=0.001': Score(0.6, 1.0),
    'lr=0.003': Score(0.8, 1.0),
    'lr=0.01': None,
    'lr=0.003_augmented': Score(0.7, 1.0),
    'run': Score(0.9, 1.0),
}


def test_the_best_try_decides_the_long_run(train, tmp_path):
    runs = Runs(SCORES)
    assert train(runs) == (0, str(tmp_path / 'run'))
    assert [name for name, _ in runs.trained] == list(SCORES)
    changes = dict(runs.trained)['run']
    assert changes['optimizer.learning_rate'] == 0.003
    assert changes['num_steps'] == 100
    assert 'augment.mixup' not in changes


def test_the_best_of_all_models_is_kept(train, tmp_path):
    assert train(Runs(SCORES | {'run': Score(0.7, 1.0)}))[1] == str(tmp_path / 'tries/lr=0.003')


def test_a_probe_that_nothing_beats_is_kept(train, tmp_path):
    runs = Runs({})
    assert train(runs)[1] == str(tmp_path / 'probe.safetensors')


def test_recorded_runs_are_not_trained_again(train):
    train(Runs(SCORES))
    again = Runs(SCORES)
    train(again)
    assert again.trained == []


def test_a_signal_ends_the_fit_with_its_code(train):
    runs = Runs(SCORES, code=143)
    assert train(runs) == (143, '')
    assert len(runs.trained) == 1


def test_the_long_run_ends_in_time(train):
    runs = Runs(SCORES)
    train(runs, seconds=50.0)
    assert 30 <= dict(runs.trained)['run']['num_steps'] <= 35


def test_without_time_for_tries_one_run_is_trained(train):
    runs = Runs(SCORES)
    plan = budget.Plan((16, 16), 8, 1, 1.0, 10.0, 0, 100, (0.003,), False)
    train(runs, plan)
    assert [name for name, _ in runs.trained] == ['run']
    assert dict(runs.trained)['run']['optimizer.learning_rate'] == 0.003
