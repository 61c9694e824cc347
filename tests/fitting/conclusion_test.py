"""A fit ends with its page, the most important numbers, and commands that run as printed."""

import importlib
import json
import shlex
import time

import numpy as np
import pytest

from tests.support import small
from tests.support.browser import require_runtime
from tests.support.datasets import write_images
from tests.support.pages import check, write_workdir
from vit_jax import cli, reporting
from vit_jax import weights as weights_lib
from vit_jax.data.photo_table import Row
from vit_jax.fitting import budget, conclusion, fit, outcome, tries
from vit_jax.fitting.suspects import Suspect
from vit_jax.reporting import rendering

CLASSES = ('oak', 'rose', 'tulip')
LINKS = ('photos.csv', 'suspects.csv', 'mistakes.csv', 'confusion.csv')


def complete(folder, attempts, best='probe.safetensors'):
    """A complete fit whose runs have these scores by stage; None diverges."""
    targets = np.eye(3, dtype=bool)[[0, 0, 1, 2, 2]]
    logits = np.array([[2.0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 1]])
    scored = outcome.score(list('abcde'), targets, logits, CLASSES, False, 2.0)
    rates = (0.001, 0.003)
    plan = budget.Plan(
        (16, 16), 8, 1, 0.1, 5.0, 10, 100, rates if attempts else (), len(attempts) > 3
    )
    return conclusion.Fit(
        folder=str(folder),
        entries={'plan': plan.as_json(), 'probe': {'score': [0.5, 1.0], 'seconds': 2.0}} | attempts,
        rows=[Row('/my photos/a.jpg', ('oak',), 'train')],
        class_names=CLASSES,
        model=f'{folder}/model.safetensors',
        best=f'{folder}/{best}',
        probe=f'{folder}/probe.safetensors',
        outcome=scored,
        suspects=[
            Suspect('a', 'oak', 0.1, 'rose', 0.8),
            Suspect('b', 'oak', 0.4, 'rose', 0.5),
            Suspect('c', 'oak', 0.6, 'rose', 0.4),
        ],
    )


def test_the_last_lines_have_the_numbers_and_the_commands(tmp_path):
    lines = conclusion.last_lines(complete(tmp_path / 'my fit', {}), 'my fit/report.html')
    assert lines[0].startswith('Accuracy 80.00 % (95 % confidence interval 37.6 to 96.4 %) on 5 ')
    assert lines[1] == "Worst classes: 'oak' 50.0 % of 2, 'rose' 100.0 % of 1, 'tulip' 100.0 % of 2"
    assert lines[2].startswith('Expected calibration error ')
    assert lines[3].startswith('2 photos may have a wrong label')
    assert lines[4:6] == ['Report: my fit/report.html', 'Next:']
    model = f'{tmp_path}/my fit/model.safetensors'
    assert [shlex.split(line) for line in lines[6:]] == [
        ['python', '-m', 'vit_jax.predict', f'--pretrained={model}', '/my photos'],
        [
            *['python', '-m', 'vit_jax.convert', model],
            *[f'{tmp_path}/my fit/model.onnx', '--to=onnx'],
        ],
        ['python', '-m', 'vit_jax.convert', model, f'{tmp_path}/my fit/web', '--to=web'],
    ]


def test_attempts_are_all_runs_and_the_best_is_chosen(tmp_path):
    """The augmented try and the long run have the rate of the best try before them."""
    scores = {
        'try lr=0.001': [0.6, 1.0],
        'try lr=0.003': [0.7, 1.0],
        'try lr=0.003_augmented': [0.65, 0.9],
        'run': [0.75, 0.8],
    }
    for path in ('tries/lr=0.001', 'tries/lr=0.003', 'tries/lr=0.003_augmented', 'run'):
        write_workdir(tmp_path / path)
    (tmp_path / 'run/report.html').write_text('')
    attempts = conclusion.attempts(complete(tmp_path, scores, best='run'))
    assert [
        (a.name, a.learning_rate, a.is_augmented, a.steps, a.score, a.page, a.is_chosen)
        for a in attempts
    ] == [
        ('linear probe', None, False, None, 0.5, '', False),
        ('try lr=0.001', 0.001, False, 1600, 0.6, '', False),
        ('try lr=0.003', 0.003, False, 1600, 0.7, '', False),
        ('try lr=0.003_augmented', 0.003, True, 1600, 0.65, '', False),
        ('long run', 0.003, False, 1600, 0.75, 'run/report.html', True),
    ]
    assert [a.seconds for a in attempts] == [2.0] * 5


def test_a_run_that_diverges_has_no_score_and_is_not_chosen(tmp_path):
    scores = {'try lr=0.001': [0.6, 1.0], 'try lr=0.003': None, 'run': [0.4, 1.0]}
    attempts = conclusion.attempts(complete(tmp_path, scores))
    assert [a.score for a in attempts] == [0.5, 0.6, None, 0.4]
    assert [a.learning_rate for a in attempts] == [None, 0.001, 0.003, 0.001]
    assert [a.is_chosen for a in attempts] == [True, False, False, False]


@pytest.fixture
def start(tmp_path):
    """Fits a linear probe to three classes, in a folder with a space in its name."""
    write_images(tmp_path / 'my data', CLASSES, 12)
    (tmp_path / 'my data/oak/IMG_1.cr2').write_bytes(b'')
    pretrained = str(tmp_path / 'pretrained.safetensors')
    weights_lib.save(small.make('vit'), pretrained, 'vit_jax')

    def run():
        return fit.run(
            fit.Settings(str(tmp_path / 'my data'), pretrained, 1.0),
            str(tmp_path / 'my fit'),
            lambda argument: cli.read_config_file(f'{tries.RECIPE}:{argument}'),
            time.monotonic(),
        )

    return run


def test_a_fit_writes_its_page_and_its_commands_run_as_printed(tmp_path, start, caplog):
    require_runtime()
    caplog.set_level('INFO')
    assert start() == 0
    folder = tmp_path / 'my fit'
    page, _ = check((folder / 'report.html').read_text(), LINKS)
    scored = json.loads((folder / 'fit.json').read_text())['outcome']
    low, high = scored['interval']
    shown = f'{100 * scored["accuracy"]:.2f} %95 % interval {100 * low:.1f} to {100 * high:.1f} %'
    assert shown in page.text
    assert '.cr2 1' in page.text
    assert 'There was no time for fine-tuning' in page.text
    commands = caplog.messages[-1].partition('Next:\n')[2].splitlines()
    assert len(commands) == 3
    for command in commands:
        assert command.strip() in page.text
        python, flag, module, *arguments = shlex.split(command)
        assert (python, flag) == ('python', '-m')
        assert not importlib.import_module(module).main(arguments)
    assert (folder / 'model.onnx').is_file()
    assert (folder / 'web/index.html').is_file()


def test_a_page_that_fails_is_a_warning(tmp_path, start, monkeypatch, caplog):
    def fails():
        raise RuntimeError('no charts today')

    monkeypatch.setattr(rendering, 'library_code', fails)
    caplog.set_level('INFO')
    assert start() == 0
    assert not (tmp_path / 'my fit' / reporting.FILE).exists()
    assert any('no charts today). The fit is complete' in line for line in caplog.messages)
    assert 'Report:' not in caplog.messages[-1]
    assert 'vit_jax.predict' in caplog.messages[-1]
