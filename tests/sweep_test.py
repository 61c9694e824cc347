"""vit_jax.sweep: its options, and sweeps that train."""

import json
import math
import re

import pytest

from tests.support.errors import refused
from tests.support.pages import check
from tests.support.runs import ROOT, begin, check_message, load, run_here
from tests.support.sweeps import LR, command, config_of, fields_of_a_sweep, valid_json
from vit_jax import sweep, vtab
from vit_jax.campaigns import sweep as campaign
from vit_jax.campaigns.scores import last_score
from vit_jax.training import loop
from vit_jax.workdir import metrics

OLD_KEYS = ('eval_split', 'eval_accuracy', 'best', 'test_split', 'test_accuracy', 'workdir')
CONFIG = 'from tests.support.runs import load\nget_config = load("quickstart").get_config\n'


@pytest.fixture
def fields(image_directory):
    return fields_of_a_sweep(image_directory)


@pytest.fixture
def config(fields):
    return config_of(fields)


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        (
            'batch_size=8,8',
            '--config.batch_size=8,8 has one value, 8: a sweep needs two or more, with',
        ),
        ('batch_size=8,x', "batch_size is 'x': expected a whole number, at least 1."),
        ('batch_size=8,', "batch_size is '': expected a whole number, at least 1."),
        ('batch_size=8,1.5', "batch_size is '1.5': expected a whole number, at least 1."),
        (f'{LR}=0.1,0', f'{LR} is 0.0: expected a number, at least 1e-30'),
        (f'{LR}=0.1,nan', f'{LR} is nan: expected a number, at least 1e-30'),
        ('optimizer.name=sgd,adan', "optimizer.name is 'adan'. Did you mean adam"),
        (
            'optimizer.weight_deacy=0,1',
            "no field 'optimizer.weight_deacy'. Did you mean optimizer.wei",
        ),
        ('lr=0.1,0.2', "no field 'lr'. Did you mean optimizer.learning_rate?"),
        ('model.resnet.width=8,16', "this config has no field 'model.resnet.width'"),
        (
            f'{LR}=0.1',
            f'needs a field with two values or more, as in --config.{LR}=0.003,0.01. Commas '
            f'in text and in fields of several values are part of one value. '
            f'{ROOT}/configs/quickstart.py '
            'has no grid of its own.',
        ),
        (LR, f'--config.{LR} has no value'),
    ],
)
def test_mistakes_are_reported_before_anything_trains(argument, message, fields, tmp_path):
    result = command(
        tmp_path / 'run',
        *(f'--config.{name}={value}' for name, value in fields.items() if name not in argument),
        f'--config.{argument}',
    )
    check_message(result, message)
    assert not (tmp_path / 'run').exists()


def test_required_field_may_be_swept(fields, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(campaign, 'run', lambda config, grid, *rest: given.append(grid) or 0)
    others = [f'--config.{name}={value}' for name, value in fields.items() if name != 'num_steps']
    result = command(tmp_path, *others, '--config.num_steps=20,10')
    assert given == [{'num_steps': [10, 20]}], result.stderr


@pytest.mark.parametrize(
    ('tried', 'code', 'message'),
    [
        (
            sweep,
            'def get_grid(name):\n    return {}',
            'get_grid() missing 1 required positional argum',
        ),
        (sweep, 'def get_grid():\n    return {"seed": (1, 1 / 0)}', 'line 4: ZeroDivisionError: '),
        (vtab, 'def get_tasks():\n    return 1 / 0', 'line 4: ZeroDivisionError: division by zero'),
        (vtab, 'import no_such_package', 'line 3: ModuleNotFoundError: No module named'),
        (vtab, 'def get_tasks(', 'was never closed'),
    ],
)
def test_error_in_a_config_file_is_reported_with_its_line(tried, code, message, tmp_path):
    (tmp_path / 'mine.py').write_text(CONFIG + code)
    result = run_here(f'--config={tmp_path}/mine.py', f'--workdir={tmp_path}/run', command=tried)
    check_message(result, message)
    assert f'a function get_{"grid" if tried is sweep else "tasks"}()' in result.stderr


@pytest.mark.parametrize(
    ('dataset', 'rates'),
    [
        ('cifar10', [0.001, 0.003, 0.01, 0.03]),
        ('oxford_flowers102', [0.001, 0.003, 0.01, 0.03]),
        ('directory', [0.001, 0.003, 0.01, 0.03]),
        ('imagenet2012', [0.003, 0.01, 0.03, 0.06]),
    ],
)
def test_grid_of_table_4(dataset, rates, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(campaign, 'run', lambda config, grid, *rest: given.append(grid) or 0)
    arguments = f'--config=configs/finetune.py:ti16,{dataset}', f'--workdir={tmp_path}'
    result = run_here(*arguments, command=sweep)
    assert f'The sweep tries the grid of configs/finetune.py:ti16,{dataset}\n' in result.stderr
    assert given == [{LR: rates}]
    rate = finetune_rate(dataset)
    assert rate in rates  # the learning rate of a single run
    result = run_here(*arguments, '--config.batch_size=8,16', command=sweep)
    assert given[1:] == [{'batch_size': [8, 16]}]  # the values of the command line replace it
    check_message(
        run_here(*arguments, f'--config.{LR}=0.2', command=sweep),
        f'--config.{LR} has one. Without this option the sweep tries the grid of '
        f'configs/finetune.py: {rates[0]}, ',
    )


def finetune_rate(dataset):
    return load('finetune').get_config(f'ti16,{dataset}').optimizer.learning_rate


def test_recipe_with_one_value_in_its_grid_is_refused(tmp_path):
    result = run_here(
        '--config=configs/finetune.py:ti16,vtab', f'--workdir={tmp_path}', command=sweep
    )
    check_message(result, 'configs/finetune.py:ti16,vtab has no grid of its own.')


def test_resumed_members_keep_the_device_count_of_an_older_version(
    fields, config, monkeypatch, tmp_path
):
    given = []
    monkeypatch.setattr(campaign, 'run', lambda *_: 0)
    monkeypatch.setattr(sweep.machine, 'cores', lambda: 2)
    monkeypatch.setattr(sweep.machine, 'start_backend', given.append)
    arguments = [
        f'--config.{LR}=0.1,0.2',
        *(f'--config.{name}={value}' for name, value in fields.items()),
    ]
    command(tmp_path, *arguments)
    begin(tmp_path / 'lr=0.2', config, without=['host_devices'])
    command(tmp_path, *arguments)
    assert given == [2, 1]


@pytest.mark.slow
def test_winner_trains_on_the_whole_split_and_is_scored_once(fields, config, tmp_path, monkeypatch):
    values = [1e-7, 1e-2]  # the first learns nothing
    result = command(
        tmp_path,
        f'--config.{LR}',
        '1e-2,1e-7',
        *(f'--config.{name}={value}' for name, value in fields.items()),
    )
    assert result.returncode == 0, result.stderr
    scores = {
        value: last_score(str(tmp_path / f'lr={value:g}'), 'eval/accuracy') for value in values
    }
    assert scores[1e-2] > scores[1e-7]
    final = json.loads((tmp_path / 'final-lr=0.01' / 'config.json').read_text())
    assert final['optimizer']['learning_rate'] == 1e-2
    assert (final['dataset']['train_split'], final['dataset']['eval_split']) == ('train', 'test')
    assert final['dataset']['num_examples'] == 60  # the config states the number of the part
    evaluated = [row for row in metrics.read(tmp_path / 'final-lr=0.01') if 'eval/accuracy' in row]
    assert [row['step'] for row in evaluated] == [30]
    accuracy = evaluated[0]['eval/accuracy']
    assert re.search(
        r'The best on train\[80%:\] is lr=0.01 with [\d.]+ % accuracy\n'
        'Its optimizer.learning_rate, 0.01, is the lowest or highest value tried',
        result.stderr,
    )
    assert re.search(r'  1e-07 +[\d.]+ %\n  0.01 +[\d.]+ %  the best\n', result.stderr)
    assert f'{100 * accuracy:.2f} % accuracy on test, in {tmp_path}/final-lr=0.01' in result.stderr
    written = valid_json((tmp_path / 'sweep.json').read_text())
    assert {key: written[key] for key in OLD_KEYS} == {
        'eval_split': 'train[80%:]',
        'eval_accuracy': {'1e-07': scores[1e-7], '0.01': scores[1e-2]},
        'best': 0.01,
        'test_split': 'test',
        'test_accuracy': accuracy,
        'workdir': str(tmp_path / 'final-lr=0.01'),
    }
    read, _ = check((tmp_path / 'report.html').read_text())
    assert [row[0].partition('scored')[0] for row in read.tables[0][1:]] == [
        'lr=1e-07',
        'lr=0.01the best · ',
        'final-lr=0.01',
    ]

    monkeypatch.setattr(loop, 'update', None)  # nothing is trained again
    assert campaign.run(config.copy_and_resolve_references(), {LR: values}, str(tmp_path)) == 0


@pytest.mark.nightly
def test_a_killed_cross_validated_sweep_resumes_and_repeats_nothing(
    fields, config, tmp_path, monkeypatch
):
    """It is killed after the first fold, and resumes to the numbers of an uninterrupted sweep."""
    fields |= {'batch_size': 8, 'num_steps': 6, 'eval_every': 6, 'report': False}
    config.update_from_flattened_dict(fields)
    grid = {LR: [1e-3, 1e-2]}
    trained = []
    train = loop.train

    def killed(config, workdir):
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(workdir)
        return train(config, workdir)

    monkeypatch.setattr(loop, 'train', killed)
    with pytest.raises(KeyboardInterrupt):
        campaign.run(config.copy_and_resolve_references(), grid, str(tmp_path / 'a'), num_folds=2)
    monkeypatch.setattr(loop, 'train', train)
    first = tmp_path / 'a' / 'lr=0.001_fold=1of2' / 'metrics.jsonl'
    before = first.read_bytes()
    assert [path.name for path in (tmp_path / 'a').glob('lr=*')] == ['lr=0.001_fold=1of2']
    arguments = [f'--config.{name}={value}' for name, value in fields.items()]
    for folder in ('a', 'b'):
        result = command(tmp_path / folder, *arguments, f'--config.{LR}=1e-3,1e-2', '--folds=2')
        assert result.returncode == 0, result.stderr
    assert first.read_bytes() == before
    outcomes = [valid_json((tmp_path / folder / 'sweep.json').read_text()) for folder in 'ab']
    assert outcomes[0]['eval_accuracy'] == outcomes[1]['eval_accuracy']
    assert len(list((tmp_path / 'a').glob('lr=*'))) == 4
    monkeypatch.setattr(loop, 'update', None)  # nothing is trained again
    assert campaign.run(config, grid, str(tmp_path / 'a'), num_folds=2) == 0


@pytest.mark.slow
def test_diverging_run_writes_valid_json(config, tmp_path):
    config.update_from_flattened_dict(
        {
            'optimizer.learning_rate': 1e30,
            'optimizer.warmup_steps': 0,
            'log_every': 100,
            'eval_every': 1,
        }
    )
    with refused('diverged') as error:
        loop.train(config, str(tmp_path))
    assert not math.isfinite(error.value.value['update_norm'])
    assert [valid_json(line) for line in (tmp_path / 'metrics.jsonl').open()] == []


def test_help_shows_the_usage(tmp_path):
    result = command(tmp_path, '--help')
    assert 'python -m vit_jax.sweep --config=configs/finetune.py' in result.stdout
    assert 'error' not in result.stderr
