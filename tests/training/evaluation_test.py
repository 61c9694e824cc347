import pytest

from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.runs import TINY, load
from vit_jax import config as config_lib
from vit_jax.training import evaluation, loop, resolve
from vit_jax.training import run as run_lib
from vit_jax.workdir import metrics


def config(root, **fields):
    made = load('quickstart').get_config()
    made.update_from_flattened_dict(
        TINY
        | {
            'num_epochs': 0.0,
            'num_steps': 4,
            'eval_every': 2,
            'batch_size': 24,
            'optimizer.warmup_steps': 0,
            'dataset.name': str(root),
            'evals.fewshot.shots': (1, 5),
        }
        | fields
    )
    return made


def rows(workdir):
    return [
        {name: value for name, value in row.items() if name.startswith('fewshot/')}
        for row in metrics.read(workdir)
        if 'eval/accuracy' in row
    ]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_resumes_with_few_shot_accuracy_added(image_directory, tmp_path, caplog):
    """Every evaluation logs it. tests/evaluate_test.py compares it with the command."""
    without = config(image_directory, **{'evals.fewshot.shots': (), 'num_steps': 2})
    assert loop.train(without, str(tmp_path)) == 0
    assert loop.train(config(image_directory), str(tmp_path)) == 0
    first, second = rows(tmp_path)
    assert first == {}
    assert set(second) == {
        'fewshot/1shot',
        'fewshot/1shot_deviation',
        'fewshot/5shot',
        'fewshot/5shot_deviation',
    }
    assert f'fewshot/5shot {100 * second["fewshot/5shot"]:.2f} %' in caplog.text


@pytest.mark.slow
def test_labels_in_the_images_are_counted_when_they_are_read(image_directory, tmp_path):
    run, _ = run_lib.resolve(config(image_directory, **{'evals.fewshot.shots': ()}), str(tmp_path))
    run.train_data.labels = None  # as for a TFDS set
    program = run.program
    program.config = resolve.with_data(
        config_lib.checked(config(image_directory, **{'evals.fewshot.shots': (21,)})), 60, 3
    )
    (few,) = evaluation.evaluators(
        program,
        run.train_data,
        run.eval_data,
        dict(
            batch_size=24,
            image_size=program.config.image_size,
            files_at_once=1,
            preprocess=program.config.preprocess,
            max_broken_fraction=0.0,
        ),
    )
    with refused('value', value=21):
        few.evaluator.run(program.initial_state().params, lambda: False)


@pytest.mark.slow
def test_another_data_set_in_several_devices_and_parts(image_directory, tmp_path):
    """The data set has its own classes. The number of parts does not change the accuracy."""
    write_images(tmp_path / 'few' / 'a', ['red', 'blue'], 9, seed=3)
    write_images(tmp_path / 'few' / 'b', ['red', 'blue'], 7, seed=4)
    fields = {
        'evals.fewshot.dataset': str(tmp_path / 'few'),
        'evals.fewshot.train_split': 'a',
        'evals.fewshot.test_split': 'b',
        'optimizer.name': 'sgd',
    }
    results = []
    for name, split in [('all', {}), ('one', {'accum_steps': 3})]:
        run, _ = run_lib.resolve(config(image_directory, **fields, **split), str(tmp_path / name))
        params = run.program.initial_state().params
        (few,) = run.evaluators
        results.append(few.evaluator.run(params, lambda: False))
        assert few.evaluator.run(params, lambda: True) is None
    assert results[0] == results[1]
    assert set(results[0]) >= {'1shot', '5shot'}


def test_impossible_settings_are_refused(image_directory, tmp_path):
    for fields, kind, field in [
        ({'shots': (1, 21)}, 'value', None),
        ({'shots': (0,)}, 'value', 'evals.fewshot.shots'),
        ({'seeds': 0}, 'value', 'evals.fewshot.seeds'),
        ({'l2': 0.0}, 'value', 'evals.fewshot.l2'),
        ({'representation': 'cls'}, 'choice', 'evals.fewshot.representation'),
        ({'dataset': 'digits'}, 'missing', 'evals.fewshot.train_split'),
        (
            {'dataset': '/no/set', 'train_split': 'a', 'test_split': 'b'},
            'missing',
            'dataset.name',
        ),
        ({'test_split': 'train'}, 'value', 'evals.fewshot.test_split'),
        ({'test_split': 'train[50%:]'}, 'value', 'evals.fewshot.test_split'),
    ]:
        fields = {f'evals.fewshot.{name}': value for name, value in fields.items()}
        with refused(kind, field=field):
            run_lib.resolve(config(image_directory, **fields), str(tmp_path))
