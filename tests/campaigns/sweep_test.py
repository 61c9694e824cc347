import json
import os
import pathlib
import re

import numpy as np
import pytest

from tests.support.errors import refused
from tests.support.pages import check, write_workdir
from tests.support.runs import begin
from tests.support.sweeps import LR, config_of, fields_of_a_sweep, pretend, valid_json
from vit_jax import reporting
from vit_jax.campaigns import splits, sweep
from vit_jax.errors import DivergedError
from vit_jax.evaluators.metric import Metric
from vit_jax.reporting import page
from vit_jax.training import loop
from vit_jax.workdir import descriptions


@pytest.fixture
def fields(image_directory):
    return fields_of_a_sweep(image_directory)


@pytest.fixture
def config(fields):
    return config_of(fields)


def test_sweep_of_several_fields_with_repeats(config, tmp_path, monkeypatch, caplog):
    """The sweep tries all combinations; final runs differ in their seeds only."""
    runs = pretend(
        monkeypatch,
        lambda config: (
            0.5 + config.optimizer.learning_rate + config.optimizer.weight_decay + config.seed / 100
        ),
    )
    grid = {LR: [0.1, 0.2], 'optimizer.weight_decay': [0.0, 0.1, 0.2]}
    assert sweep.run(config, grid, str(tmp_path), repeats=3) == 0
    members = [
        f'lr={rate}_optimizer.weight_decay={decay}'
        for rate in (0.1, 0.2)
        for decay in ('0', 0.1, 0.2)
    ]
    best = 'final-lr=0.2_optimizer.weight_decay=0.2'
    assert list(runs) == [*members, best, f'{best}_seed=1', f'{best}_seed=2']
    first = runs[best]
    assert [run | {'seed': 0} for name, run in runs.items() if name.startswith('final')] == [
        first
    ] * 3
    assert [run['seed'] for run in runs.values()] == [0] * 7 + [1, 2]
    written = valid_json((tmp_path / 'sweep.json').read_text())
    assert written['best'] == members[-1]
    assert list(written['eval_accuracy']) == members
    assert written['members'][1] == {
        'values': {LR: 0.1, 'optimizer.weight_decay': 0.1},
        'workdir': str(tmp_path / members[1]),
        'eval_accuracy': 0.7,
    }
    accuracies = [repeat['test_accuracy'] for repeat in written['repeats']]
    assert accuracies == pytest.approx([0.9, 0.91, 0.92])
    assert written['test_accuracy'] == accuracies[0]
    assert written['test_accuracy_mean'] == pytest.approx(0.91)
    assert written['test_accuracy_deviation'] == pytest.approx(0.01)
    assert 'mean of the 3: 91.00 %, standard deviation 1.00 %' in caplog.text
    assert (tmp_path / 'sweep.png').stat().st_size > 1000
    assert 'is the lowest or highest value tried' in caplog.text


@pytest.mark.parametrize('draws', [True, False])
def test_one_page_compares_all_runs(draws, config, tmp_path, monkeypatch):
    """The outcome is written even if the page cannot be."""

    def train(config, folder):
        rate = config.optimizer.learning_rate
        write_workdir(pathlib.Path(folder), config, () if rate > 1 else (rate / 2, rate))
        if rate > 1:
            raise DivergedError('the loss is nan')
        return 0

    monkeypatch.setattr(loop, 'train', train)
    if not draws:
        monkeypatch.setattr(page, 'of_several', lambda *given: 1 / 0)
    assert sweep.run(config, {LR: [0.1, 0.2, 2.0]}, str(tmp_path), repeats=2) == 0
    assert valid_json((tmp_path / 'sweep.json').read_text())['best'] == 0.2
    assert (tmp_path / 'report.html').exists() == draws
    if draws:
        read, _ = check((tmp_path / 'report.html').read_text())
        note = 'scored on train[80%:]'
        assert [row[:3] for row in read.tables[0][1:]] == [
            [f'lr=0.1{note}', '10.00 %', '10.00 %'],
            [f'lr=0.2the best · {note}', '20.00 %', '20.00 %'],
            [f'lr=2diverges · {note}', '–', '–'],
            ['final-lr=0.2scored on test', '20.00 %', '20.00 %'],
            ['final-lr=0.2_seed=1scored on test', '20.00 %', '20.00 %'],
        ]


def test_sweep_without_report_writes_no_page(config, tmp_path, monkeypatch):
    pretend(monkeypatch, lambda config: 0.5)
    monkeypatch.setattr(reporting, 'conclude_all', None)
    config.report = False
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0


def test_parts_train_their_members_only(config, tmp_path, monkeypatch, caplog):
    runs = pretend(monkeypatch, lambda config: config.batch_size / 100)
    grid = {'batch_size': [4, 8, 16]}
    assert sweep.run(config, grid, str(tmp_path), part='2/2') == 0
    assert list(runs) == ['batch_size=8']
    assert 'Trained part 2/2 of the sweep.' in caplog.text
    assert sweep.run(config, grid, str(tmp_path), part='1/2') == 0
    assert list(runs) == ['batch_size=8', 'batch_size=4', 'batch_size=16']
    assert sweep.run(config, grid, str(tmp_path)) == 0
    assert list(runs)[3:] == ['final-batch_size=16']
    for part in ('0/2', '3/2', '1/4', '2', 'a/b'):
        with refused('value', field='--part', value=part):
            sweep.run(config, grid, str(tmp_path), part=part)


@pytest.mark.parametrize(
    ('repeats', 'seed', 'field', 'value'),
    [(0, 0, '--repeats', 0), (3, 2**63 - 2, 'seed', 2**63)],
)
def test_impossible_repeats_are_refused(repeats, seed, field, value, config, tmp_path):
    config.seed = seed
    with refused('value', field=field, value=value):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), repeats)


@pytest.mark.parametrize('name', ['config.json', 'train/ant/0.png'])
def test_directory_of_a_run_or_of_images_is_refused(name, config, tmp_path, monkeypatch):
    runs = pretend(monkeypatch, lambda config: 0.5)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('{}')
    directory = tmp_path
    expected = dict(file=tmp_path / 'config.json')
    if name != 'config.json':
        config.dataset.name = str(tmp_path)
        directory = tmp_path / 'train' / 'sweep'
        expected = dict(field='--workdir', file=tmp_path / 'train')
        monkeypatch.setattr(splits, 'complete', lambda config, num_folds: config)
    with refused('conflict', **expected):
        sweep.run(config, {LR: [0.1, 0.2]}, str(directory))
    assert not runs
    assert len(list(tmp_path.rglob('*.*'))) == 1


def test_diverged_mark_of_an_older_version_counts(config, tmp_path, monkeypatch):
    """The mark does not have the newer fields."""
    runs = pretend(monkeypatch, lambda config: 0.5)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    old = {name: value for name, value in runs.pop('lr=0.2').items() if 'final_split' not in name}
    (tmp_path / 'lr=0.2' / 'diverged.json').write_text(json.dumps(old))
    runs.clear()
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    assert list(runs) == ['lr=0.1', 'final-lr=0.1']


def test_member_that_diverges_is_neither_chosen_nor_trained_again(
    config, tmp_path, caplog, monkeypatch
):
    started = []

    def run(config, folder):
        started.append(os.path.basename(folder))
        os.makedirs(folder, exist_ok=True)
        if config.optimizer.learning_rate > 0.5:
            raise DivergedError('the loss is nan')
        with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
            file.write('{"step": 1, "eval/accuracy": 0.0}\n')
        return 0

    monkeypatch.setattr(loop, 'train', run)
    for _ in range(2):
        assert sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 1.0]}, str(tmp_path)) == 0
    assert started == ['lr=0.1', 'lr=1', 'final-lr=0.1', 'lr=0.1', 'final-lr=0.1']
    assert 'lr=1 diverges and is not chosen: the loss is nan' in caplog.text
    assert re.search(r'  0\.1 +0.00 % +the best\n  1 +diverges\n', caplog.text)
    valid_json((tmp_path / 'lr=1' / 'diverged.json').read_text())
    outcome = valid_json((tmp_path / 'sweep.json').read_text())
    assert outcome['eval_accuracy'] == {'0.1': 0.0, '1': None}

    config.optimizer.warmup_steps = 20  # training may no longer diverge
    assert sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 1.0]}, str(tmp_path)) == 0
    assert started[5:] == ['lr=0.1', 'lr=1', 'final-lr=0.1']


def test_value_added_to_the_grid_may_win(config, tmp_path, monkeypatch):
    configs = {}

    def run(config, folder):
        assert (
            configs.setdefault(folder, config.to_json()) == config.to_json()
        )  # training requires this
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
            json.dump({'step': 1, 'eval/accuracy': config.optimizer.learning_rate}, file)
        return 0

    monkeypatch.setattr(loop, 'train', run)
    for values in ([0.1, 0.2], [0.1, 0.2, 0.4]):
        assert sweep.run(config.copy_and_resolve_references(), {LR: values}, str(tmp_path)) == 0
        assert valid_json((tmp_path / 'sweep.json').read_text())['best'] == values[-1]
    assert {path.name for path in tmp_path.glob('final*')} == {'final-lr=0.2', 'final-lr=0.4'}


def test_sweep_fails_if_all_members_diverge(config, tmp_path, monkeypatch):
    def diverge(config, folder):
        os.makedirs(folder)
        raise DivergedError('the loss is nan')

    monkeypatch.setattr(loop, 'train', diverge)
    with refused('diverged', field=LR, value=1.0):
        sweep.run(config, {LR: [1.0, 10.0]}, str(tmp_path))
    assert not list(tmp_path.glob('final*'))


@pytest.mark.parametrize(
    ('best_metric', 'winner'),
    [('eval/accuracy', 0.1), ('eval/loss', 0.2), ('mine/distance', 0.3)],
)
def test_best_metric_chooses_the_winner(best_metric, winner, config, tmp_path, monkeypatch):
    """The description of a metric states whether its highest or its lowest value is best."""
    distance = Metric('distance', best='lowest', panel='distance')
    values = {0.1: (0.9, 3.0, 3.0), 0.2: (0.8, 1.0, 2.0), 0.3: (0.7, 2.0, 1.0)}

    def train(config, folder):
        os.makedirs(folder, exist_ok=True)
        names = ('eval/accuracy', 'eval/loss', 'mine/distance')
        row = dict(zip(names, values[config.optimizer.learning_rate], strict=True))
        with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
            json.dump({'step': 1} | row, file)
        descriptions.write(folder, {'mine/distance': distance})
        return 0

    monkeypatch.setattr(loop, 'train', train)
    config.best_metric = best_metric
    assert sweep.run(config, {LR: [*values]}, str(tmp_path)) == 0
    written = valid_json((tmp_path / 'sweep.json').read_text())
    assert written['best'] == winner
    key = {'eval/accuracy': 'accuracy', 'eval/loss': 'loss', 'mine/distance': 'mine_distance'}
    assert written[f'test_{key[best_metric]}'] == written[f'eval_{key[best_metric]}'][f'{winner}']


def test_signal_stops_the_whole_sweep(config, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(loop, 'train', lambda config, folder: runs.append(folder) or 143)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 143
    assert len(runs) == 1


def test_sweep_of_an_earlier_version_keeps_its_slices(config, tmp_path, monkeypatch):
    """With other slices, members would be compared on different images."""
    runs = pretend(monkeypatch, lambda config: 0.5)
    begin(tmp_path / 'lr=0.2', config)
    path = tmp_path / 'lr=0.2' / 'config.json'
    recorded = valid_json(path.read_text())
    del recorded['dataset']['stratify']
    path.write_text(json.dumps(recorded))
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    assert [run['dataset.stratify'] for run in runs.values()] == [False] * 3


def test_the_member_with_the_best_mean_over_the_folds_wins(config, tmp_path, monkeypatch, caplog):
    """It need not be the best on any fold."""
    accuracies = {0.1: (0.9, 0.1, 0.5), 0.2: (0.5, 0.6, 0.6), 0.4: (0.2, 0.7, 0.7)}

    def accuracy(config):
        number = re.search('@fold=(.)', config.dataset.eval_split)
        if number is None:
            return 0.75
        return accuracies[config.optimizer.learning_rate][int(number.group(1)) - 1]

    pretend(monkeypatch, accuracy)
    assert sweep.run(config, {LR: [*accuracies]}, str(tmp_path), num_folds=3) == 0
    written = valid_json((tmp_path / 'sweep.json').read_text())
    assert written['best'] == 0.2
    assert written['test_accuracy'] == 0.75
    for member, values in zip(written['members'], accuracies.values(), strict=True):
        assert member['eval_accuracy'] == pytest.approx(np.mean(values))
        error = np.std(values, ddof=1) / np.sqrt(3)
        assert member['eval_accuracy_standard_error'] == pytest.approx(error)
        assert [fold['eval_accuracy'] for fold in member['folds']] == list(values)
        assert all((pathlib.Path(fold['workdir'])).is_dir() for fold in member['folds'])
    assert (
        'The best on 3 folds of train is lr=0.2 with 56.67 % accuracy, standard error 3.33 %'
        in (caplog.text)
    )


def test_a_member_that_diverges_on_one_fold_is_not_chosen(config, tmp_path, monkeypatch):
    config.batch_size = 8

    def train(config, folder):
        os.makedirs(folder, exist_ok=True)
        is_first = config.dataset.eval_split.endswith('@fold=1/2')
        if config.optimizer.learning_rate > 0.1 and is_first:
            raise DivergedError('the loss is nan')
        with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
            json.dump({'step': 1, 'eval/accuracy': config.optimizer.learning_rate}, file)
        return 0

    monkeypatch.setattr(loop, 'train', train)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), num_folds=2) == 0
    written = valid_json((tmp_path / 'sweep.json').read_text())
    assert written['best'] == 0.1
    assert written['eval_accuracy'] == {'0.1': 0.1, '0.2': None}
    with pytest.raises(DivergedError, match=r'all members: lr=0\.2, lr=0\.4'):
        sweep.run(config, {LR: [0.2, 0.4]}, str(tmp_path), num_folds=2)


def test_parts_of_a_cross_validated_sweep_share_the_folds(config, tmp_path, monkeypatch):
    config.batch_size = 8
    runs = pretend(monkeypatch, lambda config: 0.5)
    grid = {LR: [0.1, 0.2]}
    assert sweep.run(config, grid, str(tmp_path), part='4/4', num_folds=2) == 0
    assert list(runs) == ['lr=0.2_fold=2of2']
    for part in ('5/4', '1/5'):
        with refused('value', field='--part', value=part):
            sweep.run(config, grid, str(tmp_path), part=part, num_folds=2)


@pytest.mark.parametrize('num_folds', [-1, 1, 21])
def test_an_impossible_number_of_folds_is_refused(num_folds, config, tmp_path):
    with refused('value', field='--folds', value=num_folds):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), num_folds=num_folds)


def test_more_folds_than_images_are_refused_before_anything_trains(config, tmp_path, monkeypatch):
    runs = pretend(monkeypatch, lambda config: 0.5)
    config.dataset.final_split = 'train[:10]'
    with refused('value', value='train[:10]@fold!=1/11'):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), num_folds=11)
    assert not runs


def test_another_number_of_folds_keeps_the_finished_runs(config, tmp_path, monkeypatch):
    config.batch_size = 8
    runs = pretend(monkeypatch, lambda config: 0.5)
    for num_folds in (2, 3, 0):
        assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), num_folds=num_folds) == 0
    assert len(runs) == 2 * 2 + 2 * 3 + 2 + 1
