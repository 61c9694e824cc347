"""Short certificates of the recipes (benchmarks/certificate.py, docs/explanation/recipes.md)."""

import pathlib

import pytest

from benchmarks import certificate, source_fields
from tests.support.runs import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ('augreg', 'vit21k') else ())
        for name in certificate.RECIPES
    ],
)
def test_ten_steps_equal_those_of_the_source(name):
    loss, params = certificate.compare(name, 10, 'float32', ['float32'])['float32']
    assert loss < 1e-5
    assert params < 1e-5


@pytest.mark.parametrize('name', certificate.RECIPES)
def test_learning_rates_of_the_whole_run_equal_the_source(name):
    steps, difference = certificate.schedule_difference(name, every=1000)
    assert steps == certificate.RECIPES[name].steps
    assert difference < 1e-6


@pytest.mark.parametrize('name', source_fields.RECIPES)
def test_every_field_of_the_source_has_an_account(name):
    """rows() raises ValueError if our config has other values than the accounts."""
    recipe = source_fields.RECIPES[name]
    rows = source_fields.rows(name)
    assert [row.field for row in rows] == list(source_fields.SOURCES[recipe.source])
    for row in rows:
        assert row.account.relation in ('equal', 'converted', 'differs')
        assert row.account.note or row.account.relation != 'differs', row.field


def test_a_field_without_an_account_is_an_error(monkeypatch):
    source = source_fields.RECIPES['plain'].source
    more = source_fields.SOURCES[source] | {'schedule.cooldown_steps': 5}
    monkeypatch.setitem(source_fields.SOURCES, source, more)
    with pytest.raises(ValueError, match='schedule.cooldown_steps of .* is not accounted for'):
        source_fields.rows('plain')


@pytest.mark.parametrize(
    ('account', 'message'),
    [
        (source_fields.equal('batch_size'), 'batch_size is 1024: expected 250000 by the account'),
        (source_fields.converted('', seed=1), 'seed is 0: expected 1 by the account of input.shu'),
        (source_fields.equal('dataset.buffer'), 'dataset.buffer is .no such field.'),
        (
            source_fields.differs('', dataset__shuffle_buffer=250_000),
            'dataset.shuffle_buffer is 250000 like input.shuffle_buffer_size: expected another',
        ),
    ],
)
def test_a_wrong_account_is_an_error(account, message, monkeypatch):
    accounts = source_fields.PLAIN | {'input.shuffle_buffer_size': account}
    recipe = source_fields.RECIPES['plain']._replace(accounts=accounts)
    monkeypatch.setitem(source_fields.RECIPES, 'plain', recipe)
    with pytest.raises(ValueError, match=message):
        source_fields.rows('plain')


def test_every_file_of_configs_has_a_source_or_is_listed_without_one():
    files = {path.stem for path in pathlib.Path(ROOT, 'configs').glob('*.py')}
    with_source = {recipe.config.partition(':')[0] for recipe in source_fields.RECIPES.values()}
    assert with_source | set(source_fields.OWN) == files
    assert not with_source & set(source_fields.OWN)


def test_every_source_has_a_recipe():
    used = {recipe.source for recipe in source_fields.RECIPES.values()}
    assert used == set(source_fields.SOURCES)


def test_the_fields_are_printed(monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['certificate', '--fields', '--recipes=plain,bit'])
    certificate.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'plain: configs/plain.py:s16 and big_vision configs/vit_s16_i1k.py'
    assert '| log_training_steps | 50 | log_every=50 | equal |  |' in lines
    assert any(
        line.startswith('| train.flip | every image | augment.flip=True | diff') for line in lines
    )


def test_fields_that_the_source_does_not_have_are_listed():
    assert source_fields.without_source('plain') == {
        'dataset.num_examples': 1_268_355,
        'model.dtype': 'auto',
    }
    assert source_fields.markdown('plain').endswith(
        'Fields that the source does not have: dataset.num_examples=1268355, model.dtype=auto\n'
    )
