import json

import pytest

from tests.support.errors import refused
from tests.support.pages import write_workdir
from vit_jax import config as config_lib
from vit_jax.reporting import collect


@pytest.fixture
def workdir(tmp_path):
    return write_workdir(tmp_path / 'run')


def rows():
    """Rows with 100 images/s in the first half, 50 in the second, and two evaluations of 3 s."""
    return [
        {'step': 10, 'train/images_per_sec': 100.0},
        {'step': 10, 'eval/accuracy': 0.8, 'eval/loss': 0.5, 'eval/seconds': 3.0},
        {'step': 20, 'train/images_per_sec': 50.0},
        {'step': 20, 'eval/accuracy': 0.7, 'eval/loss': 0.6, 'eval/seconds': 3.0},
    ]


def test_summary_of_a_run():
    found = collect.summary(rows(), batch_size=40)
    assert (found['best']['step'], found['last']['step'], found['steps']) == (10, 20, 20)
    assert found['seconds'] == pytest.approx(10 * 40 / 100 + 10 * 40 / 50 + 6)
    assert found['images_per_sec'] == 75


def test_summary_of_a_run_without_evaluation_and_without_rows():
    found = collect.summary(rows()[::2], 40)
    assert (found['last'], found['best'], found['seconds']) == (None, None, 12)
    assert collect.summary([], 40) == {
        'headline': None,
        'others': {},
        'last': None,
        'best': None,
        'steps': 0,
        'seconds': None,
        'images_per_sec': None,
    }


def test_differences_from_the_recorded_recipe(workdir):
    config, _ = collect.read(str(workdir))
    flat = config_lib.flatten(config)
    (workdir / 'recipe.json').write_text(
        json.dumps(
            {
                'file': 'configs/quickstart.py',
                'config': flat
                | {'batch_size': 128, 'seed': 7, 'dataset.num_examples': 0, 'model.unroll': 4},
            }
        )
    )
    reference, name = collect.reference_of(str(workdir), flat)
    assert name == 'configs/quickstart.py'
    assert collect.differences(flat, reference) == [
        {
            'field': 'seed',
            'value': 0,
            'reference': 7,
            'meaning': config_lib.all_fields()['seed'].meaning,
        }
    ]


@pytest.mark.parametrize('damage', [None, '{', '[]', '{"file": 3}'])
def test_run_without_a_recipe_is_compared_with_the_defaults(workdir, damage):
    if damage:
        (workdir / 'recipe.json').write_text(damage)
    found = collect.run(str(workdir), 0)
    assert found['compared_with'] == 'the defaults of all fields'
    named = {row['field']: (row['value'], row['reference']) for row in found['differences']}
    assert named['num_steps'] == (1600, 0)
    assert named['model.hidden_size'] == (64, 768)
    assert 'dataset.num_examples' not in named
    assert 'augment.mixup' not in named


def test_run_of_an_older_version_gets_defaults_of_newer_fields(workdir):
    config = json.loads((workdir / 'config.json').read_text())
    del config['report'], config['masked'], config['augment']['randaugment']
    (workdir / 'config.json').write_text(json.dumps(config))
    found, _ = collect.read(str(workdir))
    assert found['report'] is True
    assert found['masked']['target'] == 'none'
    assert found['augment']['randaugment']['num_ops'] == 0
    assert found['augment']['min_area'] == 0.5


def test_directory_that_is_not_a_workdir_is_refused(workdir):
    for path in (workdir / 'nowhere', workdir.parent):
        with refused('missing', file=path):
            collect.run(str(path), 0)


def test_directory_of_workdirs_gives_all_of_them(workdir):
    """Workdirs are in the order of names. A workdir itself is returned, whatever it contains."""
    other, above = write_workdir(workdir.parent / 'another'), workdir.parent
    (above / 'empty').mkdir()
    (above / 'sweep.json').write_text('{}')
    write_workdir(workdir / 'within')
    assert list(collect.workdirs(str(above)).items()) == [(str(other), ''), (str(workdir), '')]
    for path in (workdir, above / 'empty', above / 'nowhere', above / 'sweep.json'):
        assert collect.workdirs(str(path)) == {str(path): ''}


def test_without_images_neither_model_nor_data_are_used(workdir):
    found = collect.run(str(workdir), 0)
    assert (
        {name for name in collect.PARTS if found[name] is None}
        == set(found['missing'])
        == set(collect.PARTS)
    )
    assert found['missing']['data'].endswith(f'python -m vit_jax.report {workdir} adds this part.')
