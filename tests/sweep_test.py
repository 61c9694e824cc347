import json
import os
import re

import pytest

from tests.support.runs import ROOT, TINY, load, run_here
from vit_jax import sweep
from vit_jax.errors import DivergedError, UserError
from vit_jax.training import loop
from vit_jax.workdir import metrics


def test_learning_rates_of_a_command_line():
    assert sweep.learning_rates('0.03,1e-3') == [1e-3, 0.03]


@pytest.mark.parametrize('given', ['', '0.1', '0.1,a', '1,1.0', '0,1', '-1,1', '0.1,nan', '1,inf'])
def test_learning_rates_that_make_no_grid(given):
    message = 'a sweep needs --config.optimizer.learning_rate=A,B,... with two positive numbers'
    with pytest.raises(UserError, match=f'{message}.*{given}'):
        sweep.learning_rates(given)


@pytest.mark.parametrize('flags', [[], [sweep.FLAG]])
def test_no_learning_rates(flags, caplog, tmp_path):
    config = f'--config={ROOT}/configs/quickstart.py'
    assert sweep.main([*flags, config, f'--workdir={tmp_path}']) == 1
    assert re.search(r'a sweep needs .* or more\.$', caplog.text)


@pytest.fixture
def fields(image_directory):
    return TINY | {
        'num_epochs': 0.0, 'num_steps': 30, 'eval_every': 10, 'checkpoint_every': 30,
        'dataset.name': str(image_directory), 'dataset.train_split': 'train[:80%]',
        'dataset.num_examples': 48, 'dataset.eval_split': 'train[80%:]',
        'dataset.test_split': 'test'}


@pytest.fixture
def config(fields):
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(fields)
    return config


def command(workdir, *arguments):
    """A finished `python -m vit_jax.sweep` of the quickstart."""
    return run_here('--config=configs/quickstart.py', f'--workdir={workdir}', *arguments,
                    command=sweep)


@pytest.mark.slow
def test_the_winner_trains_on_all_and_is_scored_once(fields, config, tmp_path, monkeypatch):
    values = [1e-7, 1e-2]  # the first learns nothing
    result = command(tmp_path, sweep.FLAG, '1e-2,1e-7',
                     *(f'--config.{name}={value}' for name, value in fields.items()))
    assert result.returncode == 0, result.stderr
    scores = {value: sweep.last_accuracy(tmp_path / f'lr={value:g}') for value in values}
    assert scores[1e-2] > scores[1e-7]
    final = json.loads((tmp_path / 'final-lr=0.01' / 'config.json').read_text())
    assert final['optimizer']['learning_rate'] == 1e-2
    assert (final['dataset']['train_split'], final['dataset']['eval_split']) == ('train', 'test')
    assert final['dataset']['num_examples'] == 60  # the config says that of the part
    evaluated = [row for row in metrics.read(tmp_path / 'final-lr=0.01')
                 if 'eval/accuracy' in row]
    assert [row['step'] for row in evaluated] == [30]
    accuracy = evaluated[0]['eval/accuracy']
    assert re.search(r'learning rates on train\[80%:\]: 1e-07: [\d.]+ %  0.01: [\d.]+ %\n'
                     'the best, 0.01, is at an end of those tried', result.stderr)
    assert f'{100 * accuracy:.2f} % accuracy on test, in {tmp_path}/final-lr=0.01' in result.stderr
    assert valid_json((tmp_path / 'sweep.json').read_text()) == {
        'eval_split': 'train[80%:]', 'eval_accuracy': {'1e-07': scores[1e-7], '0.01': scores[1e-2]},
        'best': 0.01, 'test_split': 'test', 'test_accuracy': accuracy,
        'workdir': str(tmp_path / 'final-lr=0.01')}

    monkeypatch.setattr(loop, 'update', None)  # nothing is trained again
    assert sweep.run(config.copy_and_resolve_references(), values, str(tmp_path)) == 0


def valid_json(text):
    def refuse(name):
        raise AssertionError(f'{name} is not JSON')

    return json.loads(text, parse_constant=refuse)


def test_what_a_diverging_run_writes_is_json(config, tmp_path):
    config.update_from_flattened_dict({
        'optimizer.learning_rate': 1e30, 'optimizer.warmup_steps': 0, 'log_every': 100,
        'eval_every': 1})
    with pytest.raises(DivergedError, match='update norm inf at step 1. No checkpoint had been'):
        loop.train(config, str(tmp_path))
    assert [valid_json(line) for line in (tmp_path / 'metrics.jsonl').open()] == []


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
        assert sweep.run(config.copy_and_resolve_references(), [0.1, 1.0], str(tmp_path)) == 0
    assert started == ['lr=0.1', 'lr=1', 'final-lr=0.1', 'lr=0.1', 'final-lr=0.1']
    assert 'learning rate 1 diverges and is not chosen: the loss is nan' in caplog.text
    assert 'learning rates on train[80%:]: 0.1: 0.00 %  1: diverges' in caplog.text
    valid_json((tmp_path / 'lr=1' / 'diverged.json').read_text())
    outcome = valid_json((tmp_path / 'sweep.json').read_text())
    assert outcome['eval_accuracy'] == {'0.1': 0.0, '1': None}

    config.optimizer.warmup_steps = 20  # with which it need not diverge
    assert sweep.run(config.copy_and_resolve_references(), [0.1, 1.0], str(tmp_path)) == 0
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
        assert sweep.run(config.copy_and_resolve_references(), values, str(tmp_path)) == 0
        assert valid_json((tmp_path / 'sweep.json').read_text())['best'] == values[-1]
    assert {path.name for path in tmp_path.glob('final*')} == {'final-lr=0.2', 'final-lr=0.4'}


def test_all_rates_diverge(config, tmp_path, monkeypatch):
    def diverge(config, folder):
        os.makedirs(folder)
        raise DivergedError('the loss is nan')

    monkeypatch.setattr(loop, 'train', diverge)
    with pytest.raises(DivergedError, match=r'all learning rates: 1, 10\. .*rate=0\.01,0\.1'):
        sweep.run(config, [1.0, 10.0], str(tmp_path))
    assert not list(tmp_path.glob('final*'))


def test_a_signal_stops_the_whole_sweep(config, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(loop, 'train', lambda config, folder: runs.append(folder) or 143)
    assert sweep.run(config, [0.1, 0.2], str(tmp_path)) == 143
    assert len(runs) == 1


def test_messages(config, tmp_path):
    config.dataset.test_split = ''
    with pytest.raises(UserError, match='dataset.test_split is empty: name the split that scores'):
        sweep.run(config, [0.1, 0.2], str(tmp_path))
    config.dataset.test_split = 'train'
    with pytest.raises(UserError, match=r"'train' has the images of .*eval_split 'train\[80%:\]'"):
        sweep.run(config, [0.1, 0.2], str(tmp_path))
    config.dataset.test_split = 'tset'
    with pytest.raises(UserError, match="dataset.test_split is 'tset': no split folder 'tset' .* "
                                        'are: test, train. Name one of them, or a slice'):
        sweep.run(config, [0.1, 0.2], str(tmp_path))
    assert not list(tmp_path.iterdir())  # before anything is trained
    result = command(tmp_path, sweep.FLAG + '=0.1,0.2', '--config.dataset.test_split=tset')
    assert result.returncode == 1
    assert ("error: dataset.test_split is 'tset': 'digits' has no split 'tset'; it has 'train' and "
            "'test'\n") in result.stderr
    assert 'Traceback' not in result.stderr


def test_help_is_the_usage(tmp_path):
    result = command(tmp_path, '--help')
    assert 'python -m vit_jax.sweep --config=configs/finetune.py' in result.stdout
    assert 'error' not in result.stderr
