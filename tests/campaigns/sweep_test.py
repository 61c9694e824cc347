import json
import os
import pathlib
import re

import pytest

from tests.support.pages import check, write_workdir
from tests.support.runs import begin
from tests.support.sweeps import LR, config_of, fields_of_a_sweep, pretend, valid_json
from vit_jax import reporting
from vit_jax.campaigns import splits, sweep
from vit_jax.errors import DivergedError, UserError
from vit_jax.reporting import page
from vit_jax.training import loop


@pytest.fixture
def fields(image_directory):
    return fields_of_a_sweep(image_directory)


@pytest.fixture
def config(fields):
    return config_of(fields)


def test_several_fields_and_repeats(config, tmp_path, monkeypatch, caplog):
    """All combinations are tried; the final run has other seeds only."""
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
    assert 'is at an end' in caplog.text


@pytest.mark.parametrize('draws', [True, False])
def test_all_runs_stand_on_one_page(draws, config, tmp_path, monkeypatch):
    """One that cannot be drawn takes nothing of the outcome."""

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
        held = 'scored on train[80%:]'
        assert [row[:3] for row in read.tables[0][1:]] == [
            [f'lr=0.1{held}', '10.00 %', '10.00 %'],
            [f'lr=0.2the best · {held}', '20.00 %', '20.00 %'],
            [f'lr=2diverges · {held}', '–', '–'],
            ['final-lr=0.2scored on test', '20.00 %', '20.00 %'],
            ['final-lr=0.2_seed=1scored on test', '20.00 %', '20.00 %'],
        ]


def test_no_page_is_drawn_where_none_is_wanted(config, tmp_path, monkeypatch):
    pretend(monkeypatch, lambda config: 0.5)
    monkeypatch.setattr(reporting, 'conclude_all', None)
    config.report = False
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0


def test_parts_side_by_side(config, tmp_path, monkeypatch, caplog):
    runs = pretend(monkeypatch, lambda config: config.batch_size / 100)
    grid = {'batch_size': [4, 8, 16]}
    assert sweep.run(config, grid, str(tmp_path), part='2/2') == 0
    assert list(runs) == ['batch_size=8']
    assert 'part 2/2 of the sweep is trained' in caplog.text
    assert sweep.run(config, grid, str(tmp_path), part='1/2') == 0
    assert list(runs) == ['batch_size=8', 'batch_size=4', 'batch_size=16']
    assert sweep.run(config, grid, str(tmp_path)) == 0
    assert list(runs)[3:] == ['final-batch_size=16']
    for part in ('0/2', '3/2', '1/4', '2', 'a/b'):
        with pytest.raises(UserError, match=f'--part={part}: expected I/N, .*members, 3'):
            sweep.run(config, grid, str(tmp_path), part=part)


@pytest.mark.parametrize(
    ('repeats', 'seed', 'message'),
    [
        (0, 0, '--repeats is 0: expected a whole number, at least 1'),
        (3, 2**63 - 2, 'seed is 9223372036854775808: expected a whole number of 64 bits'),
    ],
)
def test_impossible_repeats(repeats, seed, message, config, tmp_path):
    config.seed = seed
    with pytest.raises(UserError, match=message):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path), repeats)


@pytest.mark.parametrize('name', ['config.json', 'train/ant/0.png'])
def test_a_sweep_has_a_directory_of_its_own(name, config, tmp_path, monkeypatch):
    runs = pretend(monkeypatch, lambda config: 0.5)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('{}')
    directory, message = tmp_path, 'contains a run or a model'
    if name != 'config.json':
        config.dataset.name, message = str(tmp_path), 'whose folders dataset.name uses'
        directory = tmp_path / 'train' / 'sweep'
        monkeypatch.setattr(splits, 'complete', lambda config: config)
    with pytest.raises(UserError, match=message):
        sweep.run(config, {LR: [0.1, 0.2]}, str(directory))
    assert not runs
    assert len(list(tmp_path.rglob('*.*'))) == 1


def test_a_mark_of_an_older_version_counts(config, tmp_path, monkeypatch):
    """It lacks fields that are newer."""
    runs = pretend(monkeypatch, lambda config: 0.5)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    old = {name: value for name, value in runs.pop('lr=0.2').items() if 'final_split' not in name}
    (tmp_path / 'lr=0.2' / 'diverged.json').write_text(json.dumps(old))
    runs.clear()
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    assert list(runs) == ['lr=0.1', 'final-lr=0.1']


def test_a_rate_that_diverges_is_not_chosen_nor_tried_again(config, tmp_path, caplog, monkeypatch):
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

    config.optimizer.warmup_steps = 20  # with which it need not diverge
    assert sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 1.0]}, str(tmp_path)) == 0
    assert started[5:] == ['lr=0.1', 'lr=1', 'final-lr=0.1']


def test_a_rate_that_is_added_to_the_grid_may_win(config, tmp_path, monkeypatch):
    begun = {}

    def run(config, folder):
        assert begun.setdefault(folder, config.to_json()) == config.to_json()  # as training checks
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
            json.dump({'step': 1, 'eval/accuracy': config.optimizer.learning_rate}, file)
        return 0

    monkeypatch.setattr(loop, 'train', run)
    for values in ([0.1, 0.2], [0.1, 0.2, 0.4]):
        assert sweep.run(config.copy_and_resolve_references(), {LR: values}, str(tmp_path)) == 0
        assert valid_json((tmp_path / 'sweep.json').read_text())['best'] == values[-1]
    assert {path.name for path in tmp_path.glob('final*')} == {'final-lr=0.2', 'final-lr=0.4'}


def test_all_rates_diverge(config, tmp_path, monkeypatch):
    def diverge(config, folder):
        os.makedirs(folder)
        raise DivergedError('the loss is nan')

    monkeypatch.setattr(loop, 'train', diverge)
    with pytest.raises(DivergedError, match=r'all members: lr=1, lr=10\. .*rate=0\.01,0\.1'):
        sweep.run(config, {LR: [1.0, 10.0]}, str(tmp_path))
    assert not list(tmp_path.glob('final*'))


def test_a_signal_stops_the_whole_sweep(config, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(loop, 'train', lambda config, folder: runs.append(folder) or 143)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 143
    assert len(runs) == 1


def test_members_of_a_sweep_of_an_earlier_version_have_its_slices(config, tmp_path, monkeypatch):
    """Else members would be compared on different images."""
    runs = pretend(monkeypatch, lambda config: 0.5)
    begin(tmp_path / 'lr=0.2', config)
    path = tmp_path / 'lr=0.2' / 'config.json'
    recorded = valid_json(path.read_text())
    del recorded['dataset']['stratify']
    path.write_text(json.dumps(recorded))
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    assert [run['dataset.stratify'] for run in runs.values()] == [False] * 3
