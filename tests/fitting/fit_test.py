"""From a folder of photos to a calibrated model: what is written, and what is refused."""

import json
import pathlib
import shutil
import time
import urllib.parse

import numpy as np
import pytest
from PIL import Image

from tests.support import small
from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.pages import check
from vit_jax import cli
from vit_jax import weights as weights_lib
from vit_jax.data import photo_table
from vit_jax.fitting import budget, duplicates, fit, tries
from vit_jax.fitting.conclusion import TABLES

CLASSES = ('oak', 'rose', 'tulip')


@pytest.fixture
def pretrained(tmp_path):
    path = str(tmp_path / 'pretrained.safetensors')
    weights_lib.save(small.make('vit'), path, 'vit_jax')
    return path


def recipe(argument):
    return cli.read_config_file(f'{tries.RECIPE}:{argument}')


def run(data, pretrained, folder, minutes=1.0, folds=0):
    settings = fit.Settings(str(data), pretrained, minutes, folds=folds)
    return fit.run(settings, str(folder), recipe, time.monotonic())


def test_a_probe_is_the_model_where_there_is_no_time_to_train(tmp_path, pretrained):
    write_images(tmp_path / 'data', CLASSES, 20)
    (tmp_path / 'data/oak/broken.png').write_bytes(b'no image')
    shutil.copy(tmp_path / 'data/oak/000.png', tmp_path / 'data/oak/copy.png')
    folder = tmp_path / 'fit'
    assert run(tmp_path / 'data', pretrained, folder) == 0
    written = {path.name for path in folder.iterdir()}
    assert written >= {
        'photos.csv',
        'model.safetensors',
        'suspects.csv',
        'mistakes.csv',
        'confusion.csv',
        'fit.json',
        'train.log',
    }
    record = json.loads((folder / 'fit.json').read_text())
    assert [*record['scan']['broken']] == [str(tmp_path / 'data/oak/broken.png')]
    assert record['outcome']['accuracy'] > 0.9
    table = photo_table.read(str(folder / 'photos.csv'))
    assert len(table.rows) == 61
    by_name = {pathlib.Path(row.file).name: row for row in table.rows if 'oak' in row.labels}
    assert by_name['copy.png'].split == by_name['000.png'].split
    model = weights_lib.load(str(folder / 'model.safetensors'))
    assert tuple(model.classes) == CLASSES


def test_a_complete_fit_is_not_repeated(tmp_path, pretrained, caplog):
    write_images(tmp_path / 'data', CLASSES, 12)
    assert run(tmp_path / 'data', pretrained, tmp_path / 'fit') == 0
    before = (tmp_path / 'fit/photos.csv').read_bytes()
    assert run(tmp_path / 'data', pretrained, tmp_path / 'fit') == 0
    assert (tmp_path / 'fit/photos.csv').read_bytes() == before
    with refused('conflict', field='minutes', value=2.0):
        run(tmp_path / 'data', pretrained, tmp_path / 'fit', minutes=2.0)


def test_the_probe_is_cross_validated_on_train_and_val(tmp_path, pretrained, caplog):
    write_images(tmp_path / 'data', CLASSES, 20)
    folder = tmp_path / 'fit'
    assert run(tmp_path / 'data', pretrained, folder, folds=4) == 0
    result = json.loads((folder / 'fit.json').read_text())['cross_validation']
    assert len(result['accuracies']) == 4
    assert result['mean'] == pytest.approx(np.mean(result['accuracies']))
    error = np.std(result['accuracies'], ddof=1) / 2
    assert result['standard_error'] == pytest.approx(error)
    rows = photo_table.read(str(folder / 'photos.csv')).rows
    assert result['num_images'] == sum(row.split != 'test' for row in rows)
    assert 'by cross-validation, standard error' in caplog.text
    suspects = (folder / 'suspects.csv').read_text().splitlines()
    assert len(suspects) == 1 + len(rows)
    with refused('conflict', field='folds', value=0):
        run(tmp_path / 'data', pretrained, folder)


@pytest.mark.parametrize('folds', [-2, 1, 21])
def test_an_impossible_number_of_folds_is_refused(folds, tmp_path, pretrained):
    with refused('value', field='--folds', value=folds):
        run(tmp_path / 'data', pretrained, tmp_path / 'fit', folds=folds)
    assert not (tmp_path / 'fit').exists()


def test_more_folds_than_groups_are_refused_before_training(tmp_path, pretrained):
    write_images(tmp_path / 'data', CLASSES, 5)
    with refused('value', field='--folds', value=20):
        run(tmp_path / 'data', pretrained, tmp_path / 'fit', folds=20)
    assert not (tmp_path / 'fit' / 'probe.safetensors').exists()


@pytest.mark.slow
def test_fine_tuning_is_better_than_the_probe_where_it_can_be(tmp_path, pretrained, monkeypatch):
    """Classes that differ in the place of a bright pixel, which random features hardly show."""
    monkeypatch.setattr(budget, 'measure', lambda config: budget.Measured(0.05, 1.0, 1))
    monkeypatch.setattr(budget, '_LEAST_SECONDS', 1.0)
    # To a random model all of these images are near duplicates, which stay in one split.
    monkeypatch.setattr(duplicates, 'near_pairs', lambda *arguments: [])
    rng = np.random.default_rng(0)
    for k, name in enumerate(CLASSES):
        (tmp_path / 'data' / name).mkdir(parents=True)
        for i in range(80):
            pixels = rng.integers(0, 60, (16, 16, 3)).astype(np.uint8)
            pixels[4 * k : 4 * k + 4] += 120
            Image.fromarray(pixels).save(tmp_path / 'data' / name / f'{i}.png')
    folder = tmp_path / 'fit'
    assert run(tmp_path / 'data', pretrained, folder, minutes=15.0) == 0
    record = json.loads((folder / 'fit.json').read_text())
    assert record['plan']['run_steps'] > 0
    assert record['run'] is not None
    best = max([record['probe']['score'], record['run']], key=lambda score: (score[0], -score[1]))
    assert record['outcome']['accuracy'] >= best[0] - 0.1
    assert (folder / 'run/report.html').exists()
    assert json.loads((folder / 'run/recipe.json').read_text())['file'].startswith('finetune:')
    tried = {
        f'tries/{urllib.parse.quote(path.name)}/report.html'
        for path in (folder / 'tries').iterdir()
        if path.is_dir()
    }
    assert len(tried) >= len(budget.RATES)
    links = {'run/report.html', 'tries/report.html', *tried}
    page, _ = check((folder / 'report.html').read_text(), links | set(TABLES))
    assert links <= {link['href'] for link in page.of('a')}


def test_photos_that_cannot_be_fitted_are_refused(tmp_path, pretrained):
    write_images(tmp_path / 'one', ['oak'], 5)
    with refused('content', value=['oak']):
        run(tmp_path / 'one', pretrained, tmp_path / 'a')
    write_images(tmp_path / 'few', CLASSES, 2)
    with refused('content', value=['oak 2', 'rose 2', 'tulip 2']):
        run(tmp_path / 'few', pretrained, tmp_path / 'b')
    for name in CLASSES:
        (tmp_path / 'broken' / name).mkdir(parents=True)
        (tmp_path / 'broken' / name / '1.jpg').write_bytes(b'no image')
    with refused('content', file=tmp_path / 'broken/oak/1.jpg'):
        run(tmp_path / 'broken', pretrained, tmp_path / 'c')
