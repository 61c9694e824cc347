"""A metric of the user and a second data set, from the config to every reader.

The code of the metric is in docs/how-to/add-a-metric.md; the package does not change.
"""

import json
import sys

import pytest

from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.extending import example
from tests.support.pages import Read
from tests.support.runs import TINY, load, run_here
from vit_jax import cli, evaluate
from vit_jax import config as config_lib
from vit_jax.reporting import charts, collect, page
from vit_jax.training import loop
from vit_jax.training import run as run_lib
from vit_jax.workdir import metrics, saved_params

pytestmark = pytest.mark.slow

BALANCED = 'balanced/balanced_accuracy'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """Two folders with different images of the same three classes."""
    root = tmp_path_factory.mktemp('data')
    for folder, split, count, seed in (
        ('first', 'train', 12, 0),
        ('first', 'val', 5, 1),
        ('second', 'test', 4, 2),
    ):
        write_images(root / folder / split, ['ant', 'bee', 'cat'], count, seed=seed)
    for path in sorted((root / 'second').rglob('*.png')):  # labels go by the names of files
        path.rename(path.with_name(f'{path.parent.name}_{path.name}'))
    labels = [[0, 1]] * 4 + [[1]] * 4 + [[]] * 4
    (root / 'real.json').write_text(json.dumps(labels))
    return root


@pytest.fixture(scope='module')
def my_lab(tmp_path_factory):
    """A package outside of the project with two examples of the docs."""
    root = tmp_path_factory.mktemp('outside')
    (root / 'my_lab').mkdir()
    (root / 'my_lab' / '__init__.py').write_text('')
    for name in ('balanced', 'norms'):
        (root / 'my_lab' / f'{name}.py').write_text(example(f'my_lab/{name}.py'))
    (root / 'my_lab' / 'broken.py').write_text(
        'from vit_jax.evaluators.evaluator import SumEvaluator\n'
        'def broken(context):\n'
        "    return SumEvaluator(lambda params, batch: batch['masks'], dict, [])\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield root
    for name in [name for name in sys.modules if name.partition('.')[0] == 'my_lab']:
        del sys.modules[name]


OPTIONS = [
    '--config.evals.balanced.type=my_lab.balanced:balanced',
    '--config.evals.norms.type=my_lab.norms:norms',
    '--config.evals.norms.every=1',
    '--config.evals.v2.type=classification',
    '--config.evals.v2.split=test',
    '--config.evals.near.type=knn',
    '--config.evals.real.type=classification',
    '--config.evals.real.split=test',
    '--config.best_metric=balanced/balanced_accuracy',
    '--config.keep_best=True',
]


def with_data(data):
    """OPTIONS with the data sets of their evaluators."""
    return [
        *OPTIONS,
        f'--config.evals.v2.dataset={data / "second"}',
        f'--config.evals.real.dataset={data / "second"}',
        f'--config.evals.real.labels={data / "real.json"}',
    ]


def config_of(data, options, **fields):
    config = load('quickstart').get_config()
    config.update_from_flattened_dict(
        TINY
        | {
            'num_epochs': 0.0,
            'num_steps': 2,
            'eval_every': 2,
            'batch_size': 8,
            'report': False,
            'optimizer.warmup_steps': 0,
            'image_size': (8, 8),
            'dataset.name': str(data / 'first'),
            'dataset.eval_split': 'val',
        }
        | fields
    )
    return cli.override(config, options)


@pytest.fixture(scope='module')
def finished(data, my_lab, tmp_path_factory):
    """The workdir of a run with five evaluators in addition to the main one."""
    workdir = tmp_path_factory.mktemp('run')
    options = with_data(data)
    assert loop.train(config_of(data, options), str(workdir)) == 0
    return workdir


def last_of(workdir):
    return [row for row in metrics.read(str(workdir)) if 'eval/loss' in row][-1]


def test_rows_have_every_evaluator_at_its_own_steps(finished):
    rows = metrics.read(str(finished))
    assert [row['step'] for row in rows if 'norms/parameters' in row] == [1, 2]
    assert [row['step'] for row in rows if BALANCED in row] == [2]
    row = last_of(finished)
    assert (row['eval/num_examples'], row['v2/num_examples']) == (15, 12)
    assert row['real/num_examples'] == 8  # the other four have no label
    assert 0 < row['real/mean_average_precision'] <= 1
    assert {'v2/accuracy', 'v2/loss', 'near/accuracy'} <= row.keys()
    # All classes have the same number of images, so that both means are equal.
    assert row[BALANCED] == pytest.approx(row['eval/accuracy'])


def test_the_workdir_describes_the_metrics_and_keeps_the_best(finished):
    described = json.loads((finished / 'metrics.json').read_text())
    assert described[BALANCED]['best'] == 'highest'
    best = json.loads((finished / 'best.json').read_text())
    assert best[BALANCED] == last_of(finished)[BALANCED]
    assert saved_params.kept_best(str(finished), [2]) == (2, f'{BALANCED} {best[BALANCED]:.4f}')
    assert json.loads((finished / 'config.json').read_text())['evals']['v2']['split'] == 'test'


def test_the_report_has_their_curves_and_numbers(finished):
    found = collect.run(str(finished), 0)
    drawn = charts.curves({'run': found['rows']}, 3, {'run': found['metrics']})
    series = {chart['title']: [row['name'] for row in chart['series']] for chart in drawn}
    assert series['Accuracy'] == [
        'top-1',
        'balanced: balanced accuracy',
        'near: accuracy',
        'real: top-1',
        'real: mean average precision',
        'v2: top-1',
    ]
    assert series['Loss'] == ['training', 'evaluation', 'real: evaluation', 'v2: evaluation']
    assert series['Norm'] == ['norms: parameters']
    text = Read(page.of_one(found)).text
    assert 'balanced: Balanced accuracy' in text
    assert 'v2: Accuracy' in text


def test_the_log_has_their_metrics(finished, data, my_lab, caplog):
    options = with_data(data)
    config = config_of(data, options, num_steps=3)
    assert loop.train(config, str(finished)) == 0  # it resumes
    row = last_of(finished)
    (line,) = [line for line in caplog.messages if line.startswith('step 3/3  eval accuracy')]
    assert f'{BALANCED} {100 * row[BALANCED]:.2f} %' in line
    assert f'v2/loss {row["v2/loss"]:.4f}' in line
    assert row['step'] == 3


def test_evaluate_has_the_numbers_of_the_run(finished, my_lab):
    row = last_of(finished)
    argv = [f'--workdir={finished}/checkpoints/{row["step"]}', '--json', '--batch_size=8']
    for options, names in (
        (['--type=my_lab.balanced:balanced'], [BALANCED]),
        (['--evals=balanced,v2'], [BALANCED, 'v2/accuracy', 'v2/loss']),
    ):
        result = run_here(*argv, *options, command=evaluate)
        assert result.returncode == 0, result.stderr
        output = json.loads(result.stdout.splitlines()[-1])
        values = {}
        for part in output.get('results', [output]):
            values |= part
        assert {name: values[name] for name in names} == pytest.approx(
            {name: row[name] for name in names}, rel=1e-5
        )
        assert values['metrics'][names[-1]]['best'] in ('highest', 'lowest')


def test_a_run_resumes_with_other_evaluators(finished, data, my_lab, tmp_path):
    """Evaluators change no parameters."""
    config = config_of(data, [], num_steps=4)
    assert loop.train(config, str(finished)) == 0
    assert 'v2/loss' not in last_of(finished)
    assert BALANCED in json.loads((finished / 'metrics.json').read_text())


@pytest.mark.parametrize(
    ('options', 'kind', 'field'),
    [
        (['.v2.tipe=knn'], 'unknown', 'evals.v2.tipe'),
        (['.fewshoot.shots=5'], 'unknown', 'evals.fewshoot.shots'),
        (['.v2.split=val'], 'missing', 'evals.v2.type'),
        (['.eval.type=knn'], 'value', 'evals.eval'),
        (['.v2.type=knn', '.v2.every=-1'], 'value', 'evals.v2.every'),
    ],
)
def test_impossible_sections_are_refused(options, kind, field, data):
    with refused(kind, field=field):
        config_lib.checked(config_of(data, [f'--config.evals{option}' for option in options]))


@pytest.mark.parametrize(
    ('options', 'kind', 'attributes'),
    [
        (
            ['.v2.type=classification', '.v2.dataset=digits'],
            'missing',
            {'field': 'evals.v2.split'},
        ),
        (
            ['.v2.type=classification', '.v2.dataset=digits', '.v2.split=test'],
            'content',
            {'field': 'evals.v2.dataset', 'value': 'digits'},
        ),
        (['.v2.type=classification', '.v2.split=no'], 'unknown', {'value': 'no'}),
        (['.v2.type=my_lab.broken:broken'], 'other', {'field': 'evals.v2'}),
        (['.v2.type=clasification'], 'choice', {'field': 'evals.v2.type'}),
        (
            ['.v2.type=classification', '.v2.labels=no.json'],
            'unreadable',
            {'field': 'evals.v2.labels'},
        ),
        (
            ['.v2.type=knn', '.v2.split=train'],
            'value',
            {'field': 'evals.v2.split', 'value': 'train'},
        ),
    ],
)
def test_evaluators_that_cannot_run_are_refused_before_training(
    options, kind, attributes, data, my_lab, tmp_path
):
    config = config_of(data, [f'--config.evals{option}' for option in options])
    with refused(kind, **attributes):
        run_lib.resolve(config, str(tmp_path))


def test_a_section_of_a_config_file_may_lack_fields():
    config = load('quickstart').get_config()
    config.evals.v2 = dict(type='classification', split='val')
    section = config_lib.checked(config).evals.v2
    assert (section.split, section.every, section.options) == ('val', 0, '')
    config.evals.v2 = dict(typ='classification')
    with refused('unknown', field='evals.v2.typ'):
        config_lib.checked(config)
