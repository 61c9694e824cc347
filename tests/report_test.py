"""vit_jax.report, and the page at the end of a run, with small real models and data."""

import json
import pathlib
import re

import pytest

from tests.support.pages import check, write_workdir
from tests.support.runs import TINY, arguments, check_message, load, run_here
from vit_jax import config as config_lib
from vit_jax import evaluate, main, report, reporting
from vit_jax.data import pipeline
from vit_jax.processes import consensus
from vit_jax.reporting import collect, page
from vit_jax.training import loop
from vit_jax.workdir import metrics

STEPS = {'num_epochs': 0.0, 'num_steps': 12, 'eval_every': 6, 'log_every': 3}


@pytest.fixture
def workdir(tmp_path):
    """A workdir without a checkpoint."""
    return write_workdir(tmp_path / 'run')


def test_two_runs_without_images(workdir, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    other = write_workdir(tmp_path / 'other')
    assert report.main([str(workdir), str(other), '--images=0']) == 0
    assert 'Wrote ./report.html (0.9 MB): open it in a browser' in caplog.text
    read, _ = check(pathlib.Path('report.html').read_text())
    assert [row[0] for row in read.tables[0][1:]] == ['run', 'other']


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['nowhere'], 'nowhere is not the workdir of a run: it has no config.json.'),
        (['RUN', '--images=-1'], '--images is -1: expected a whole number, at least 0.'),
        (
            ['RUN', '--out=nowhere/x.html'],
            'nowhere/x.html cannot be written: there is no directory',
        ),
        (['RUN', '--out=x.png'], 'x.png cannot be written: expected a name that ends in .html.'),
    ],
)
def test_mistakes_are_reported(options, message, workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [option.replace('RUN', str(workdir)) for option in options]
    check_message(run_here(*given, command=report), f'error: {message}')


def test_page_has_the_reasons_of_missing_parts(workdir):
    config = workdir / 'config.json'
    config.write_text(config.read_text().replace('"name": "digits"', '"name": "/nowhere/digits"'))
    read, _ = check(page.of_one(collect.run(str(workdir), 10)))
    assert "no directory '/nowhere/digits'" in read.text
    assert read.text.count(f'{workdir} has no checkpoint.') == 2
    assert '50.00 %' in read.text


@pytest.fixture
def trained_main(monkeypatch, tmp_path):
    """The training command without training; returns the calls of reporting."""
    asked = []
    monkeypatch.setattr(reporting, 'record_recipe', lambda *given: asked.append(given))
    monkeypatch.setattr(loop, 'train', lambda config, workdir, log_to_file: trained_main.code)
    monkeypatch.setattr(reporting, 'conclude', asked.append)

    def start(code, **fields):
        trained_main.code = code
        assert run_here(*arguments(tmp_path / 'run', **fields), command=main).returncode == code
        return asked

    return start


def test_complete_run_gets_a_page(trained_main, tmp_path):
    (workdir, recipe), concluded = trained_main(
        0, fields={'report': True, 'num_steps': 700, 'seed': 3}
    )
    assert workdir == concluded == str(tmp_path / 'run')
    assert recipe['file'].endswith('configs/quickstart.py')
    assert (recipe['config']['num_steps'], recipe['config']['seed']) == (1600, 0)
    assert recipe['config']['image_size'] == [16, 16]


def test_run_without_report_has_no_page(trained_main):
    assert not trained_main(0, fields={'report': False})


def test_stopped_run_records_its_recipe(trained_main):
    """A later page of the command then equals the page of a complete run."""
    ((_, recipe),) = trained_main(143, fields={'report': True})
    assert recipe['file'].endswith('configs/quickstart.py')


def test_recipe_is_recorded(tmp_path, caplog):
    reporting.record_recipe(str(tmp_path), RECIPE)
    assert json.loads((tmp_path / 'recipe.json').read_text()) == RECIPE
    assert not caplog.messages
    reporting.record_recipe(str(tmp_path / 'none'), RECIPE)
    assert (
        'Did not write recipe.json, so pages of the run compare it with the defaults' in caplog.text
    )


RECIPE = {'file': 'configs/x.py', 'config': {}}


def test_failed_page_is_one_warning(workdir, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError('no picture today\nbecause')

    monkeypatch.setattr(collect, 'run', fails)
    reporting.conclude(str(workdir))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert line == (
        f'Did not write {workdir}/report.html (RuntimeError: no picture today). The '
        f'run is complete; python -m vit_jax.report {workdir} tries again.'
    )


def test_page_of_all_runs_in_a_directory(tmp_path, monkeypatch, caplog):
    """The page is written at the end of a sweep, or later from the files alone."""
    config = load('quickstart').get_config()
    config.dataset.eval_split = 'train[90%:]'
    notes = {
        str(write_workdir(tmp_path / name, config, accuracies)): note
        for name, accuracies, note in (
            ('lr=0.1', (0.25, 0.75), 'the best'),
            ('lr=9', (), 'diverges'),
        )
    }
    notes[str(write_workdir(tmp_path / 'final', accuracies=[0.5]))] = ''
    reporting.conclude_all(str(tmp_path), notes)
    assert caplog.messages[-1] == f'  report      {tmp_path}/report.html'
    read, data = check((tmp_path / 'report.html').read_text())
    assert read.tables[0][1:] == [
        ['lr=0.1the best · scored on train[90%:]', '75.00 %', '75.00 %', '0.5000', '1,600'],
        ['lr=9diverges · scored on train[90%:]', '–', '–', '–', '0'],
        ['finalscored on test', '50.00 %', '50.00 %', '1.0000', '800'],
    ]
    assert [
        x for x in read.tables if ['dataset.eval_split', 'train[90%:]', 'train[90%:]', 'test'] in x
    ]
    assert {row['run'] for row in data['charts']['curve-0']['layer'][0]['data']['values']} == {
        'lr=0.1',
        'final',
    }
    first = read.tables[0]
    write_workdir(tmp_path / 'another')
    for remembered in (True, False):  # with and without the notes in report.json
        (tmp_path / 'report.html').unlink()
        assert report.main([str(tmp_path), '--images=0']) == 0
        read, _ = check((tmp_path / 'report.html').read_text())
        rows = [row[0] for row in read.tables[0][1:]]
        if remembered:
            assert read.tables[0][:-1] == first
            (tmp_path / 'report.json').unlink()
        else:
            assert [row.partition('scored')[0] for row in rows] == [
                'another',
                'final',
                'lr=0.1',
                'lr=9',
            ]
    monkeypatch.setattr(page, 'of_several', lambda *given: 1 / 0)
    reporting.conclude_all(str(tmp_path), notes)
    assert caplog.messages[-1] == (
        f'Did not write {tmp_path}/report.html (ZeroDivisionError: division by zero). All runs '
        f'are complete; python -m vit_jax.report {tmp_path} tries again.'
    )


def test_process_0_of_several_writes_without_the_model(workdir, monkeypatch):
    asked = []
    monkeypatch.setattr(collect, 'run', lambda *given: asked.append(given) or {})
    monkeypatch.setattr(page, 'of_one', lambda found: 'page')
    monkeypatch.setattr(consensus, 'count', lambda: 2)
    monkeypatch.setattr(consensus, 'is_main', lambda: False)
    reporting.conclude(str(workdir))
    assert asked == []
    monkeypatch.setattr(consensus, 'is_main', lambda: True)
    reporting.conclude(str(workdir))
    assert [given[1] for given in asked] == [0]


def test_recipe_of_a_command():
    found = main.recipe_of('configs/vit.py:b16')
    assert found['file'] == 'configs/vit.py:b16'
    assert found['config']['seed'] == 0
    json.dumps(found)


def trained(workdir, name='quickstart', argument=(), **fields):
    config = load(name).get_config(*argument)
    config.update_from_flattened_dict(
        {
            name: x
            for name, x in (TINY | STEPS | fields).items()
            if name in config_lib.flatten(config)
        }
    )
    assert loop.train(config, str(workdir)) == 0
    return workdir


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
    """Returns the workdir of a finished run with its page, and its log."""
    workdir = tmp_path_factory.mktemp('report') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, 'SECONDS', 600)  # a slow machine evaluates all images as well
        result = run_here(*arguments(workdir, fields=TINY | STEPS | {'report': True}))
    assert result.returncode == 0, result.stderr
    return workdir, result.stderr


@pytest.fixture(scope='module')
def run(ended):
    return ended[0]


@pytest.fixture(scope='module')
def written(run):
    """Returns the source of the page, its elements and the data of its scripts."""
    source = (run / 'report.html').read_text()
    return source, *check(source)


@pytest.mark.slow
def test_unreadable_photos_have_their_reason(run, monkeypatch):
    batches = pipeline.eval_batches
    monkeypatch.setattr(
        pipeline,
        'eval_batches',
        lambda *args, **kwargs: (
            batch | {'mask': batch['mask'] < 0} for batch in batches(*args, **kwargs)
        ),
    )
    found = collect.run(str(run), 10)
    assert found['inspection']['missing']['explorer'] == (
        'none of the first images of test can be read'
    )
    assert found['missing']['predictions'] == 'none of the images of test can be evaluated.'
    check(page.of_one(found))


@pytest.mark.slow
def test_page_has_the_numbers_of_metrics_jsonl(run, written):
    _, read, data = written
    rows = metrics.read(str(run))
    drawn = {
        name: {
            row['step']: row['value']
            for row in data['charts'][chart]['layer'][0]['data']['values']
            if row['series'] == name
        }
        for chart, name in (
            ('curve-0', 'training'),
            ('curve-0', 'evaluation'),
            ('curve-1', 'top-1'),
        )
    }
    for name, key in (
        ('training', 'train/loss'),
        ('evaluation', 'eval/loss'),
        ('top-1', 'eval/accuracy'),
    ):
        assert drawn[name] == {row['step']: row[key] for row in rows if key in row}
    assert f'{100 * rows[-1]["eval/accuracy"]:.2f} %' in read.text
    assert f'{rows[-1]["eval/loss"]:.4f}' in read.text


@pytest.mark.slow
def test_confusion_matrix_equals_evaluate(run, written, capsys):
    _, read, _ = written
    assert evaluate.main([f'--workdir={run}', '--json']) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = list(result['confusion'])
    table = next(table for table in read.tables if table[0][1:] == names)
    assert {
        row[0]: {name: int(x) for name, x in zip(names, row[1:], strict=True) if x}
        for row in table[1:]
    } == result['confusion']
    assert sum(int(x) for row in table[1:] for x in row[1:] if x) == 360
    assert (
        f'accuracy {100 * result["eval/accuracy"]:.2f} %, loss {result["eval/loss"]:.4f}'
        in read.text
    )
    assert f'{100 * result["calibration"]["expected_error"]:.2f} %' in read.text
    classes = next(table for table in read.tables if table[0][:2] == ['class', 'accuracy'])
    assert {row[0]: row[1].strip() for row in classes[1:]} == {
        name: f'{100 * row["accuracy"]:.1f} %' for name, row in result['classes'].items()
    }


@pytest.mark.slow
def test_pictures_and_explorer(run, written):
    source, read, data = written
    assert len(source) < 1.5e6
    explorer = data['explorer']
    assert (len(explorer['photos']), explorer['heads']) == (4, 2)
    assert all(
        (len(photo['layers']), photo['queries'], photo['keys'], photo['class_token'])
        == (2, [4, 4], [4, 4], True)
        for photo in explorer['photos']
    )
    assert len({photo['label'] for photo in explorer['photos']}) == 4
    alts = [image['alt'] for image in read.of('img')]
    assert sum('training image' in alt for alt in alts) == 24
    mistakes = [alt for alt in alts if re.match('labelled .*, predicted', alt)]
    assert 24 < len(mistakes) <= 48
    wrong = [re.findall(r'labelled (\d), predicted (\d)', alt)[0] for alt in mistakes]
    right = [label == predicted for label, predicted in wrong]
    assert right == sorted(right)  # the mistakes come first
    assert {'filters', 'similarity', 'explorer'} <= {
        name for name, x in collect.run(str(run), 32)['inspection'].items() if x
    }


@pytest.mark.slow
def test_page_of_few_images(run, tmp_path):
    out = tmp_path / 'few.html'
    assert report.main([str(run), '--images=70', f'--out={out}']) == 0
    read, _ = check(out.read_text())
    assert '70 of the 360 images of test were evaluated for this page' in read.text
    table = next(table for table in read.tables if table[0][1:] == list('0123456789'))
    assert sum(int(x) for row in table[1:] for x in row[1:] if x) == 70


@pytest.mark.nightly
@pytest.mark.parametrize('family', ['resnet', 'axial', 'hybrid'])
def test_page_of_other_families(family, tmp_path):
    assert report.main([str(trained(tmp_path, argument=(family,))), '--images=64']) == 0
    read, data = check((tmp_path / 'report.html').read_text())
    assert ('a ResNet has no attention between patches' in read.text) == (family == 'resnet')
    assert ('a ResNet has no position embedding' in read.text) == (family == 'resnet')
    assert (data['explorer'] is None) == (family == 'resnet')
    if family == 'axial':  # attention along rows and along columns
        assert len(data['explorer']['photos'][0]['layers']) == 4
        assert not data['explorer']['photos'][0]['class_token']


@pytest.mark.slow
def test_page_of_masked_patches_with_few_shots(tmp_path):
    workdir = trained(
        tmp_path,
        **{
            'masked.target': 'mean_color',
            'model.pool': 'gap',
            'evals.fewshot.shots': (5,),
            'evals.fewshot.representation': 'patch_mean',
            'num_steps': 6,
        },
    )
    assert report.main([str(workdir)]) == 0
    read, data = check((tmp_path / 'report.html').read_text())
    assert 'The run predicts masked patches and no classes' in read.text
    assert 'Few-shot, 5shot' in read.text
    assert 'right colours' in read.text
    assert data['explorer']['photos']


@pytest.mark.slow
def test_page_of_images_with_several_labels(tmp_path):
    from tests.support.datasets import write_images

    for split, count in (('train', 24), ('test', 10)):
        write_images(tmp_path / 'data', [split], count)
        (tmp_path / 'data' / split / 'labels.csv').write_text(
            ''.join(f'{i:03}.png,{["ant;bee", "bee", "ant;cat"][i % 3]}\n' for i in range(count))
        )
    workdir = trained(
        tmp_path / 'run',
        **{
            'dataset.name': str(tmp_path / 'data'),
            'image_size': (8,),
            'loss.name': 'sigmoid',
            'batch_size': 8,
            'num_steps': 6,
        },
    )
    assert report.main([str(workdir)]) == 0
    read, _ = check((workdir / 'report.html').read_text())
    assert 'average precision' in read.text
    assert 'Confusion matrix' not in read.text
    assert any(image['alt'] == 'a training image of ant, bee' for image in read.of('img'))


@pytest.mark.slow
def test_run_ends_with_its_page(ended, written):
    workdir, log = ended
    assert log.splitlines()[-1] == f'  report      {workdir}/report.html'
    _, read, _ = written
    assert 'Fields that differ from' in read.text
    assert ['num_stepslength of the run in steps; 0: num_epochs decides', '12', '1600'] in [
        row for table in read.tables for row in table
    ]
