"""The facts of a card equal the records of fits, runs and evaluations."""

import json

import pytest

from tests.support import published, small
from tests.support.errors import refused
from vit_jax.fitting import collect
from vit_jax.publishing import facts

RESULT = {
    'dataset': '/home/ann/flowers',
    'split': 'test',
    'eval/accuracy': 0.625,
    'eval/num_examples': 16.0,
    'calibration': {'expected_error': 0.03125, 'bins': []},
    'classes': {
        name: {'accuracy': k / 8 if k else None, 'num_examples': 2 * k}
        for k, name in reversed(list(enumerate(small.CLASSES)))
    },
}


@pytest.fixture
def result(tmp_path):
    """Writes the output of vit_jax.evaluate --json with some changes."""

    def write(**changes):
        path = tmp_path / 'result.json'
        path.write_text(json.dumps(RESULT | changes))
        return str(path)

    return write


@pytest.mark.parametrize('source', ['fit', 'fit/model.safetensors'])
def test_facts_of_a_fit_are_those_of_its_files(source, tmp_path):
    outcome = published.write_fit(tmp_path / 'fit')
    found = facts.read(str(tmp_path / source), small.make('vit'))
    assert found.base == 'google/base'
    assert found.data == facts.Data('flowers', True, published.SPLITS)
    evaluation = found.evaluation
    assert (evaluation.split, evaluation.data) == (collect.TEST, found.data)
    for name in ('num_images', 'accuracy', 'interval', 'calibration_error'):
        assert getattr(evaluation, name) == getattr(outcome, name), name
    assert evaluation.classes == tuple(row[:3] for row in outcome.classes)
    values = [value for _, value, _ in evaluation.classes]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_another_model_in_the_folder_of_a_fit_has_no_outcome(tmp_path):
    published.write_fit(tmp_path / 'fit')
    found = facts.read(str(tmp_path / 'fit/probe.safetensors'), small.make('vit'))
    assert found == facts.Facts()


def test_a_fit_that_was_stopped_has_data_and_no_evaluation(tmp_path, caplog):
    published.write_fit(tmp_path / 'fit')
    path = tmp_path / 'fit/fit.json'
    record = json.loads(path.read_text())
    del record['outcome']
    path.write_text(json.dumps(record))
    found = facts.read(str(tmp_path / 'fit'), small.make('vit'))
    assert found.evaluation is None
    assert found.data.splits == published.SPLITS
    assert 'has no outcome' in caplog.text


def test_a_damaged_fit_is_an_error_that_names_the_field(tmp_path):
    published.write_fit(tmp_path / 'fit')
    path = tmp_path / 'fit/fit.json'
    record = json.loads(path.read_text())
    record['outcome']['accuracy'] = 'high'
    path.write_text(json.dumps(record))
    with refused('content', field='outcome.accuracy', file=path, value='high'):
        facts.read(str(tmp_path / 'fit'), small.make('vit'))


@pytest.mark.parametrize('keep_best', [False, True])
def test_facts_of_a_run_are_those_of_its_files(keep_best, tmp_path):
    row = {'step': 10, 'eval/accuracy': 0.8125, 'eval/num_examples': 80.0}
    loaded = published.write_run(
        tmp_path / 'run', row, pretrained='timm:vit_b', keep_best=keep_best
    )
    found = facts.read(str(tmp_path / 'run'), loaded)
    assert found.base == 'timm/vit_b'
    assert found.data == facts.Data('flowers', True, {'train': 500, 'val': 80})
    assert found.evaluation == facts.Evaluation(
        found.data, 'val', 80, 0.8125, chose_model=keep_best
    )


def test_a_run_without_an_evaluation_of_the_step_has_no_accuracy(tmp_path, caplog):
    row = {'step': 5, 'eval/accuracy': 0.8125, 'eval/num_examples': 80.0}
    loaded = published.write_run(tmp_path / 'run', row)
    assert facts.read(str(tmp_path / 'run'), loaded).evaluation is None
    assert 'has no evaluation of step 10' in caplog.text


def test_a_result_of_evaluate_replaces_the_recorded_scores(tmp_path, result):
    published.write_fit(tmp_path / 'fit')
    found = facts.read(str(tmp_path / 'fit'), small.make('vit'), result())
    assert found.data.splits == published.SPLITS
    assert found.evaluation == facts.Evaluation(
        data=facts.Data('flowers', True),
        split='test',
        num_images=16,
        accuracy=0.625,
        calibration_error=0.03125,
        classes=tuple((small.CLASSES[k], k / 8, 2 * k) for k in range(1, 7)),
        is_held_out=False,
    )


def test_a_result_of_another_model_is_refused(result):
    path = result(classes={'ant': {'accuracy': 1.0, 'num_examples': 3}})
    with refused('conflict', field='--evaluation', file=path, value=1):
        facts.read('hf:google/base', small.make('vit'), path)


def test_several_results_are_refused(result):
    path = result(results=[])
    with refused('content', field='--evaluation', file=path):
        facts.read('hf:google/base', small.make('vit'), path)


@pytest.mark.parametrize(
    ('source', 'base'), [('hf:google/base', 'google/base'), ('weights.npz', '')]
)
def test_of_bare_weights_at_most_the_origin_is_known(source, base):
    assert facts.read(source, small.make('vit')) == facts.Facts(base=base)


@pytest.mark.parametrize(
    ('name', 'shown', 'is_local'),
    [
        ('cifar10', 'cifar10', False),
        ('imagenet_v2/topimages', 'imagenet_v2/topimages', False),
        ('/home/ann/flowers/', 'flowers', True),
        ('photos/labels.csv', 'labels', True),
    ],
)
def test_a_card_tells_no_folders_of_this_machine(name, shown, is_local, result):
    found = facts.read('x.npz', small.make('vit'), result(dataset=name)).evaluation
    assert (found.data.name, found.data.is_local) == (shown, is_local)
