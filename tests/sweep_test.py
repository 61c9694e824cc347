import json
import os
import pathlib
import re

import pytest

from tests.support.datasets import write_images
from tests.support.pages import check, write_workdir
from tests.support.runs import ROOT, TINY, begin, check_message, load, run_here
from vit_jax import config as config_lib
from vit_jax import reporting, sweep, vtab
from vit_jax.data.sources import open_source
from vit_jax.errors import DivergedError, UserError
from vit_jax.reporting import page
from vit_jax.training import loop
from vit_jax.workdir import metrics

LR = 'optimizer.learning_rate'
OLD_KEYS = ('eval_split', 'eval_accuracy', 'best', 'test_split', 'test_accuracy', 'workdir')
QUICKSTART = f'--config={ROOT}/configs/quickstart.py'


def test_what_is_swept_on_a_command_line():
    rest = [
        QUICKSTART,
        '--workdir=a,b',
        '--config.image_size=32,48',
        '--config.seed=1',
        '--config.dataset.name=x,y',
        '--config.optimizer.lr_factors=^head/=1,.=0',
        '--config.hidden=1,2',
        '--config.batch_size',
        '8',
    ]
    texts, others = sweep.separate(
        [
            *rest[:3],
            f'--config.{LR}=0.03,1e-3',
            *rest[3:6],
            '--config.augment.flip',
            'true,false',
            *rest[6:],
        ]
    )
    assert texts == {LR: '0.03,1e-3', 'augment.flip': 'true,false'}
    assert others == rest


def test_values_have_the_types_of_their_fields(config):
    grid = sweep.read_grid(
        {
            LR: '0.03,1e-3,1e-3',
            'augment.flip': 'true,false',
            'batch_size': '16,8',
            'optimizer.name': 'sgd,adam',
        },
        config,
    )
    assert grid == {
        LR: [1e-3, 0.03],
        'augment.flip': [False, True],
        'batch_size': [8, 16],
        'optimizer.name': ['sgd', 'adam'],
    }
    assert config.batch_size == 32


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
        ('optimizer.name=sgd,adan', "optimizer.name is 'adan'. Did you mean adam?"),
        (
            'optimizer.weight_deacy=0,1',
            "no field 'optimizer.weight_deacy'. Did you mean optimizer.wei",
        ),
        ('lr=0.1,0.2', "no field 'lr'. Did you mean optimizer.learning_rate?"),
        ('model.resnet.width=8,16', "this config has no field 'model.resnet.width'"),
        (
            f'{LR}=0.1',
            f'needs a field with two values or more, as in --config.{LR}=0.003,0.01. Commas '
            f'in fields of several values and in text belong to one value. '
            f'{ROOT}/configs/quickstart.py '
            'has no grid of its own.',
        ),
        (LR, f'Missing value for flag --config.{LR}'),
    ],
)
def test_mistakes(argument, message, fields, tmp_path):
    result = command(
        tmp_path / 'run',
        *(f'--config.{name}={value}' for name, value in fields.items() if name not in argument),
        f'--config.{argument}',
    )
    check_message(result, message)
    assert not (tmp_path / 'run').exists()


def test_a_field_without_which_the_config_is_impossible(fields, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(sweep, 'run', lambda config, grid, *rest: given.append(grid) or 0)
    others = [f'--config.{name}={value}' for name, value in fields.items() if name != 'num_steps']
    result = command(tmp_path, *others, '--config.num_steps=20,10')
    assert given == [{'num_steps': [10, 20]}], result.stderr


def test_a_field_is_swept_once():
    with pytest.raises(UserError, match=f'--config.{LR} is given twice: give it once'):
        sweep.separate([f'--config.{LR}=1,2', f'--config.{LR}', '3,4'])
    for one in ([f'--config.{LR}=3'], [f'--config.{LR}', '3']):
        with pytest.raises(UserError, match=f'--config.{LR} is given twice: give it once'):
            sweep.separate([f'--config.{LR}=1,2', *one])


CONFIG = 'from tests.support.runs import load\nget_config = load("quickstart").get_config\n'


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
def test_mistakes_in_the_config_file(tried, code, message, tmp_path):
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
def test_the_grid_of_table_4(dataset, rates, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(sweep, 'run', lambda config, grid, *rest: given.append(grid) or 0)
    arguments = f'--config=configs/finetune.py:ti16,{dataset}', f'--workdir={tmp_path}'
    result = run_here(*arguments, command=sweep)
    assert f'the grid is that of configs/finetune.py:ti16,{dataset}\n' in result.stderr
    assert given == [{LR: rates}]
    rate = finetune_rate(dataset)
    assert rate in rates  # what a single run takes
    result = run_here(*arguments, '--config.batch_size=8,16', command=sweep)
    assert given[1:] == [{'batch_size': [8, 16]}]  # the values of the command line replace it
    check_message(
        run_here(*arguments, f'--config.{LR}=0.2', command=sweep),
        f'--config.{LR} has one. Without it the grid of configs/finetune.py is taken: {rates[0]}, ',
    )


def finetune_rate(dataset):
    return load('finetune').get_config(f'ti16,{dataset}').optimizer.learning_rate


def test_a_recipe_whose_grid_is_one_value(tmp_path):
    result = run_here(
        '--config=configs/finetune.py:ti16,vtab', f'--workdir={tmp_path}', command=sweep
    )
    check_message(result, 'configs/finetune.py:ti16,vtab has no grid of its own.')


@pytest.fixture
def fields(image_directory):
    return TINY | {
        'num_epochs': 0.0,
        'num_steps': 30,
        'eval_every': 10,
        'checkpoint_every': 30,
        'dataset.name': str(image_directory),
        'dataset.train_split': 'train[:80%]',
        'dataset.num_examples': 48,
        'dataset.eval_split': 'train[80%:]',
        'dataset.test_split': 'test',
    }


@pytest.fixture
def config(fields):
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(fields)
    return config


def command(workdir, *arguments):
    """A finished `python -m vit_jax.sweep` of the quickstart."""
    return run_here(QUICKSTART, f'--workdir={workdir}', *arguments, command=sweep)


def test_members_go_on_with_as_many_devices_as_those_of_an_older_version(
    fields, config, monkeypatch, tmp_path
):
    given = []
    monkeypatch.setattr(sweep, 'run', lambda *_: 0)
    monkeypatch.setattr(sweep.machine, 'cores', lambda: 2)
    monkeypatch.setattr(sweep.machine, 'check_backend', given.append)
    arguments = [
        f'--config.{LR}=0.1,0.2',
        *(f'--config.{name}={value}' for name, value in fields.items()),
    ]
    command(tmp_path, *arguments)
    begin(tmp_path / 'lr=0.2', config, without=['host_devices'])
    command(tmp_path, *arguments)
    assert given == [2, 1]


@pytest.mark.slow
def test_the_winner_trains_on_all_and_is_scored_once(fields, config, tmp_path, monkeypatch):
    values = [1e-7, 1e-2]  # the first learns nothing
    result = command(
        tmp_path,
        f'--config.{LR}',
        '1e-2,1e-7',
        *(f'--config.{name}={value}' for name, value in fields.items()),
    )
    assert result.returncode == 0, result.stderr
    scores = {value: metrics.last_accuracy(tmp_path / f'lr={value:g}') for value in values}
    assert scores[1e-2] > scores[1e-7]
    final = json.loads((tmp_path / 'final-lr=0.01' / 'config.json').read_text())
    assert final['optimizer']['learning_rate'] == 1e-2
    assert (final['dataset']['train_split'], final['dataset']['eval_split']) == ('train', 'test')
    assert final['dataset']['num_examples'] == 60  # the config says that of the part
    evaluated = [row for row in metrics.read(tmp_path / 'final-lr=0.01') if 'eval/accuracy' in row]
    assert [row['step'] for row in evaluated] == [30]
    accuracy = evaluated[0]['eval/accuracy']
    assert re.search(
        r'the best on train\[80%:\] is lr=0.01 with [\d.]+ % accuracy\n'
        'its optimizer.learning_rate, 0.01, is at an end of those',
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
    assert sweep.run(config.copy_and_resolve_references(), {LR: values}, str(tmp_path)) == 0


def valid_json(text):
    def refuse(name):
        raise AssertionError(f'{name} is not JSON')

    return json.loads(text, parse_constant=refuse)


@pytest.mark.slow
def test_what_a_diverging_run_writes_is_json(config, tmp_path):
    config.update_from_flattened_dict(
        {
            'optimizer.learning_rate': 1e30,
            'optimizer.warmup_steps': 0,
            'log_every': 100,
            'eval_every': 1,
        }
    )
    with pytest.raises(DivergedError, match='update_norm is inf at step 1. No checkpoint had been'):
        loop.train(config, str(tmp_path))
    assert [valid_json(line) for line in (tmp_path / 'metrics.jsonl').open()] == []


def pretend(monkeypatch, accuracy):
    """Training that only writes what a function of the config says; returns configs by folder."""
    runs = {}

    def run(config, folder):
        runs[os.path.basename(folder)] = config_lib.flatten(config)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, 'metrics.jsonl'), 'w', encoding='utf-8') as file:
            json.dump({'step': 1, 'eval/accuracy': accuracy(config)}, file)
        return 0

    monkeypatch.setattr(loop, 'train', run)
    return runs


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


def test_a_sweep_of_a_subset_stays_inside_of_it(config, tmp_path, monkeypatch):
    """As those of VTAB: 800 of 1,000 images train, 200 choose, then the 1,000 train."""
    runs = pretend(monkeypatch, lambda config: 0.5)
    config.batch_size = 8
    config.dataset.update(
        train_split='train[:24]',
        eval_split='train[24:30]',
        num_examples=0,
        final_split='train[:30]',
    )
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0

    def images(split):
        source = open_source(config.dataset.name, split)
        return {source.name_of(index) for index in range(source.num_examples)}

    seen = {name: images(run['dataset.train_split']) for name, run in runs.items()}
    assert seen['lr=0.1'] | images(runs['lr=0.1']['dataset.eval_split']) == images('train[:30]')
    assert seen['final-lr=0.1'] == images('train[:30]')
    assert seen['lr=0.1'] < seen['final-lr=0.1'] < images('train')
    assert len(seen['final-lr=0.1']) == 30
    assert {run['dataset.final_split'] for run in runs.values()} == {''}  # as in older workdirs
    assert valid_json((tmp_path / 'sweep.json').read_text())['final_split'] == 'train[:30]'


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
    directory, message = tmp_path, 'holds a run or a model'
    if name != 'config.json':
        config.dataset.name, message = str(tmp_path), 'whose folders dataset.name takes for classes'
        directory = tmp_path / 'train' / 'sweep'
        monkeypatch.setattr(sweep, '_with_splits', lambda config: config)
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


def test_splits_that_cannot_be_used(config, tmp_path):
    config.dataset.test_split = ''
    with pytest.raises(UserError, match='dataset.test_split is empty: name the split that scores'):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.test_split = 'train'
    with pytest.raises(UserError, match=r"'train' has images of .*eval_split 'train\[80%:\]'"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.test_split = 'tset'
    with pytest.raises(
        UserError,
        match="dataset.test_split is 'tset': no split folder 'tset' .* "
        'are: test, train. Name one of them, or a slice',
    ):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.update(test_split='train[85%:]', eval_split='train[80%:85%]')
    with pytest.raises(
        UserError,
        match=r"test_split 'train\[85%:\]' has images of "
        "dataset.final_split 'train', which the winner trains on",
    ):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.update(train_split='train[:90%]', final_split='train[:84%]')
    with pytest.raises(UserError, match=r"test_split .* of dataset.train_split 'train\[:90%\]'"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.test_split = 'test'
    with pytest.raises(UserError, match=r"eval_split 'train\[80%:85%\]' .* all members train on"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    config.dataset.final_split = 'tran'
    with pytest.raises(UserError, match="dataset.final_split is 'tran': no split folder 'tran'"):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))
    assert not list(tmp_path.iterdir())  # before anything is trained
    result = command(tmp_path, f'--config.{LR}=0.1,0.2', '--config.dataset.test_split=tset')
    assert result.returncode == 1
    assert (
        "error: dataset.test_split is 'tset': 'digits' has no split 'tset'; it has 'train' and "
        "'test'\n"
    ) in result.stderr
    assert 'Traceback' not in result.stderr


@pytest.mark.parametrize(
    ('splits', 'advice'),
    [
        ({'eval_split': 'test'}, {'train': '[:90%]', 'eval': '[90%:]', 'final': ''}),
        ({'final_split': 'test'}, {'train': '[:90%]', 'eval': '[90%:]', 'final': ''}),
        ({'eval_split': 'train'}, {'train': '[:90%]', 'eval': '[90%:]', 'final': ''}),
        (
            {'test_split': 'train'},
            {'train': '[:80%]', 'eval': '[80%:90%]', 'final': '[:90%]', 'test': '[90%:]'},
        ),
    ],
)
def test_the_advice_for_splits_trains_on_no_part_of_the_test_split(
    splits, advice, config, tmp_path, monkeypatch
):
    """And a sweep can follow it."""
    config.dataset.update(splits)
    config.dataset.num_examples = 0
    with pytest.raises(UserError) as error:
        sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path))
    assert str(error.value).endswith(
        'hold out a part, as in '
        + ' '.join(f'--config.dataset.{name}_split=train{part}' for name, part in advice.items())
    )
    pretend(monkeypatch, lambda config: 0.5)
    config.dataset.update({f'{name}_split': f'train{part}' for name, part in advice.items()})
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path)) == 0


def test_a_sum_does_not_tell_what_the_best_one_trains_on(config, tmp_path):
    config.dataset.update(train_split='train[:20]+test[:4]', final_split='')
    with pytest.raises(UserError, match=r'is the sum train\[:20\]\+test\[:4\]: name what the best'):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))


def test_sums_of_splits_are_compared_by_part(config, tfds_directory, tmp_path, monkeypatch):
    pretend(monkeypatch, lambda config: 0.5)
    config.batch_size = 8
    config.dataset.update(
        name='dots',
        data_dir=str(tfds_directory['tfrecord']),
        num_examples=0,
        train_split='train[:20]',
        eval_split='test[:4]',
        test_split='test[4:]',
        final_split='train[:20]+test[:4]',
        label='label/2',
    )
    assert sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path)) == 0
    config.dataset.final_split = 'train[:20]+test[:5]'
    with pytest.raises(
        UserError,
        match=r"test_split 'test\[4:\]' has images of dataset.final_split"
        r" 'train\[:20\]\+test\[:5\]', which the winner trains on",
    ):
        sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path))


def test_help_is_the_usage(tmp_path):
    result = command(tmp_path, '--help')
    assert 'python -m vit_jax.sweep --config=configs/finetune.py' in result.stdout
    assert 'error' not in result.stderr


@pytest.mark.parametrize('test_split', ['', 'test'])  # recipes have the second
@pytest.mark.parametrize('part', ['', 'train/'])
def test_a_directory_with_no_split_but_one_is_cut_into_three(
    part, test_split, config, tmp_path, monkeypatch, caplog
):
    write_images(tmp_path / 'data' / part, ['ant', 'bee'], 20)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.dataset.update(eval_split='', test_split=test_split)
    runs = pretend(monkeypatch, lambda config: 0.5)
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep')) == 0
    splits = [(run['dataset.train_split'], run['dataset.eval_split']) for run in runs.values()]
    assert splits == [('train[:80%]', 'train[80%:90%]')] * 2 + [('train[:90%]', 'train[90%:]')]
    assert 'which is cut into three parts: members train on train[:80%]' in caplog.text


@pytest.mark.parametrize(
    ('folders', 'splits', 'advice'),
    [
        (
            ['train', 'test'],
            {'train_split': 'train[:90%]', 'eval_split': 'train[90%:]'},
            {'test': 'test'},
        ),
        (['train', 'val', 'test'], {'eval_split': ''}, {'test': 'test'}),
        (
            ['train', 'val'],
            {'eval_split': ''},
            {'train': 'train[:90%]', 'final': 'train[:90%]', 'test': 'train[90%:]'},
        ),
        (
            ['train'],
            {'train_split': 'train[:90%]', 'eval_split': 'train[90%:]'},
            {
                'train': 'train[:80%]',
                'eval': 'train[80%:90%]',
                'final': 'train[:90%]',
                'test': 'train[90%:]',
            },
        ),
    ],
)
def test_what_gives_a_sweep_a_test_split(folders, splits, advice, config, tmp_path, monkeypatch):
    """And a sweep can follow it."""
    for number, folder in enumerate(folders):
        write_images(tmp_path / 'data' / folder, ['ant', 'bee'], 20, seed=number)
    config.dataset.update(name=str(tmp_path / 'data'), train_split='train', num_examples=0)
    config.dataset.update(splits, test_split='')
    options = [f'--config.dataset.{name}_split={split}' for name, split in advice.items()]
    for missing, message in (
        ('', 'test_split is empty'),
        ('tset', "test_split is 'tset': no split"),
    ):
        config.dataset.test_split = missing
        with pytest.raises(UserError, match=f'dataset.{message}') as error:
            sweep.run(config.copy_and_resolve_references(), {LR: [0.1, 0.2]}, str(tmp_path / 's'))
        assert str(error.value).endswith(' '.join(options))
    pretend(monkeypatch, lambda config: 0.5)
    config.dataset.update({f'{name}_split': split for name, split in advice.items()})
    assert sweep.run(config, {LR: [0.1, 0.2]}, str(tmp_path / 'sweep')) == 0


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
