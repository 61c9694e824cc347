import json

import pytest

from tests.config_test import load
from tests.conftest import TINY, write_images
from vit_jax import evaluate, metrics, train


@pytest.fixture(scope='module')
def run(tmp_path_factory, image_directory):
    """A short run on three classes, averaged parameters and all."""
    workdir = tmp_path_factory.mktemp('evaluate') / 'run'
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(TINY | {
        'num_epochs': 0.0, 'num_steps': 8, 'eval_every': 0, 'dataset.name': str(image_directory),
        'ema_decay': 0.5, 'batch_size': 24})
    assert train.run(config, str(workdir)) == 0
    return workdir


def command(capsys, *arguments):
    """(exit code, JSON of the last line of stdout)."""
    code = evaluate.main([*arguments, '--batch_size=8', '--json'])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_workdir_scores_as_its_run_logged(run, capsys):
    code, result = command(capsys, f'--workdir={run}')
    logged = metrics.read(run / 'metrics.jsonl')[-1]
    assert code == 0
    for name in ('eval/accuracy', 'eval/accuracy_top5', 'eval/num_examples'):
        assert result[name] == logged[name]
    assert result['eval/loss'] == pytest.approx(logged['eval/loss'], rel=1e-5)
    assert list(result['classes']) == ['ant', 'bee', 'cat']
    right = sum(c['accuracy'] * c['num_examples'] for c in result['classes'].values())
    assert right / 12 == pytest.approx(result['eval/accuracy'])


def test_weights_on_another_split(run, image_directory, capsys):
    """60 images in batches of 8: the last one is padded, and every image counts once."""
    code, result = command(capsys, f'--pretrained={run}', f'--dataset={image_directory}',
                           '--split=train')
    assert code == 0
    assert {c['num_examples'] for c in result['classes'].values()} == {20}


def test_table(run, capsys):
    assert evaluate.main([f'--workdir={run}']) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4
    assert out[-1].startswith('accuracy ')
    assert out[-1].endswith(' on 12 images')


def test_other_classes(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(evaluate.logs.LOGGER, 'propagate', True)
    write_images(tmp_path / 'two' / 'test', ['ant', 'bee'], 2)
    write_images(tmp_path / 'three' / 'test', ['ant', 'bee', 'dog'], 2)
    for folder, message in [('two', 'ant'), ('three', 'dog'), ('missing', 'no directory')]:
        assert evaluate.main([f'--workdir={run}', f'--dataset={tmp_path / folder}']) == 1
        assert message in caplog.records[-1].getMessage()
    assert evaluate.main([f'--workdir={run}', '--batch_size=0']) == 1
    assert '--batch_size is 0' in caplog.records[-1].getMessage()
    assert evaluate.main([f'--pretrained={run}']) == 1
    assert '--pretrained needs --dataset=NAME_OR_DIRECTORY' in caplog.records[-1].getMessage()
