import json
import os
import pathlib

import pytest

from tests.support.pages import check, write_workdir
from tests.support.runs import ROOT, begin, check_message, run_here
from vit_jax import config as config_lib
from vit_jax import vtab
from vit_jax.campaigns import vtab as campaign
from vit_jax.errors import DivergedError, UserError
from vit_jax.training import loop

CONFIG = """
import runpy

def get_config(arg):
    model, task = arg.split(',')
    config = runpy.run_path({quickstart!r})['get_config']()
    config.dataset.update(
        name='digits' if task != 'b' else 'cifar100', data_dir='/nowhere',
        train_split='train[:40]', eval_split='train[40:50]', final_split='train[:50]',
        test_split='test', num_examples=40)
    return config

def get_tasks():
    return dict(a='First', b='First', c='Second', d='Second')
"""


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / 'tasks.py'
    path.write_text(CONFIG.format(quickstart=f'{ROOT}/configs/quickstart.py'))
    return path


def command(tasks, *arguments):
    return run_here(
        f'--config={tasks}:any', f'--workdir={tasks.parent}/all', *arguments, command=vtab
    )


def test_one_command_trains_all_tasks(tasks, monkeypatch):
    """Tasks train on the 1,000 examples and are scored once; the rest are named."""
    runs = {}

    def train(config, folder):
        task = os.path.basename(folder)
        runs[task] = config_lib.flatten(config)
        scores = {'a': [0.5], 'c': [0.75], 'd': []}[task]
        write_workdir(pathlib.Path(folder), config, scores)
        if not scores:
            raise DivergedError('loss nan')
        return 0

    monkeypatch.setattr(loop, 'train', train)
    result = command(tasks, '--config.seed=3')
    assert result.returncode == 0, result.stderr
    assert list(runs) == ['a', 'c', 'd']
    for run in runs.values():
        assert (
            run['dataset.train_split'],
            run['dataset.eval_split'],
            run['eval_every'],
            run['seed'],
            run['keep_best'],
        ) == ('train[:50]', 'test', 0, 3, False)
    assert "Left out b: data set 'cifar100' is not prepared" in result.stderr
    assert "tfds.builder('cifar100', data_dir='/nowhere').download" in result.stderr
    assert 'WARNING Left out b: data set' in (tasks.parent / 'all' / 'train.log').read_text()
    assert 'd diverges and has no score: loss nan' in result.stderr
    lines = [' '.join(line.split()) for line in result.stderr.splitlines()]
    first = lines.index('First, mean, of 1 of 2 tasks 50.00 %')
    assert lines[first : first + 7] == [
        'First, mean, of 1 of 2 tasks 50.00 %',
        'a 50.00 %',
        'b no data',
        'Second, mean, of 1 of 2 tasks 75.00 %',
        'c 75.00 %',
        'd diverges',
        'all, mean, of 2 of 4 tasks 62.50 %',
    ]
    written = json.loads((tasks.parent / 'all' / 'vtab.json').read_text())
    assert written == {
        'tasks': {
            'a': {'group': 'First', 'test_accuracy': 0.5},
            'c': {'group': 'Second', 'test_accuracy': 0.75},
            'd': {'group': 'Second', 'test_accuracy': None},
        },
        'failed': [],
        'missing': ['b'],
        'means': {
            'First': {'test_accuracy': 0.5, 'tasks': 1, 'of': 2},
            'Second': {'test_accuracy': 0.75, 'tasks': 1, 'of': 2},
            'all': {'test_accuracy': 0.625, 'tasks': 2, 'of': 4},
        },
    }
    read, _ = check((tasks.parent / 'all' / 'report.html').read_text())
    assert [row[:2] for row in read.tables[0][1:]] == [
        ['aFirst', '50.00 %'],
        ['cSecond', '75.00 %'],
        ['dSecond · diverges', '–'],
    ]
    result = command(tasks, '--tasks=a')
    assert (
        f'These numbers leave out c, d, also in {tasks.parent / "all"}. Name all' in result.stderr
    )


def test_other_tasks_train_if_one_fails(tasks, monkeypatch):
    """If all tasks fail, earlier scores stay."""
    words = {'a': 'a record is damaged', 'c': 'another is damaged', 'd': ''}

    def train(config, folder):
        task = os.path.basename(folder)
        if words[task]:
            raise UserError(words[task])
        write_workdir(pathlib.Path(folder), config, [0.25])
        return 0

    monkeypatch.setattr(loop, 'train', train)
    result = command(tasks)
    assert result.returncode == 1
    assert 'task a failed: a record is damaged\n' in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        'error: 2 of 4 tasks failed, for the reasons above: a, c. Fix these, and run the same '
    )
    lines = [' '.join(line.split()) for line in result.stderr.splitlines()]
    assert {'a failed', 'b no data', 'c failed', 'd 25.00 %'} < set(lines)
    path = tasks.parent / 'all' / 'vtab.json'
    written = json.loads(path.read_text())
    assert (written['failed'], written['missing']) == (['a', 'c'], ['b'])
    words.update(d='the disk is full')
    assert '3 of 4 tasks failed, for the reasons above: a, c, d' in command(tasks).stderr
    assert json.loads(path.read_text())['tasks'] == {
        'd': {'group': 'Second', 'test_accuracy': 0.25}
    }
    path.with_name('config.json').write_text('{}')
    assert f'{path.parent} contains a run or a model' in command(tasks).stderr


def test_resumed_tasks_keep_the_device_count_of_an_older_version(tasks, monkeypatch):
    given = []
    monkeypatch.setattr(campaign, 'run', lambda *_: 0)
    monkeypatch.setattr(vtab.machine, 'cores', lambda: 2)
    monkeypatch.setattr(vtab.machine, 'start_backend', given.append)
    command(tasks)
    begin(tasks.parent / 'all' / 'c', config_lib.base(), without=['host_devices'])
    command(tasks)
    assert given == [2, 1]


def test_best_metric_scores_the_tasks(tasks, monkeypatch):
    def train(config, folder):
        write_workdir(pathlib.Path(folder), config, [0.25])
        return 0

    monkeypatch.setattr(loop, 'train', train)
    result = command(tasks, '--config.best_metric=eval/loss')
    assert result.returncode == 0, result.stderr
    assert 'loss on the test splits, after training on the final splits:' in result.stderr
    written = json.loads((tasks.parent / 'all' / 'vtab.json').read_text())
    assert list(written['tasks']['a']) == ['group', 'test_loss']
    assert list(written['means']['all']) == ['test_loss', 'tasks', 'of']


def test_signal_stops_all_tasks(tasks, monkeypatch):
    monkeypatch.setattr(loop, 'train', lambda config, folder: 143)
    result = command(tasks, '--tasks=c, a')
    assert result.returncode == 143
    assert 'Run the same command again' in result.stderr
    assert not (tasks.parent / 'all' / 'vtab.json').exists()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--tasks=a,e'], "--tasks is 'e'. It is one of: a, b, c, d."),
        (
            ['--config.dataset.num_classes=9'],
            "the task a: 'digits' has 10 classes, and the recipe 9: prepare the set again.",
        ),
        (['--tasks=b'], 'the data of all tasks are missing on this machine'),
        (
            ['--config.dataset.label=colour'],
            "the task a: dataset.label (--label) is 'colour': only TFDS sets have a choice of "
            "labels. Leave it empty for 'digits'.",
        ),
        (
            ['--coordinator=localhost:1', '--num_processes=2', '--process_id=0'],
            'vit_jax.vtab runs as one process, but was started as one of 2',
        ),
        (['--config.batchsize=3'], 'Did you mean batch_size'),
    ],
)
def test_mistakes_are_reported_before_anything_trains(tasks, arguments, message):
    check_message(command(tasks, *arguments), message)
    assert not (tasks.parent / 'all').exists()
