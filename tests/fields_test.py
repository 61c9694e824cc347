"""Declarations of fields: accepted values, parsing, checks and messages."""

import dataclasses
from typing import Annotated

import numpy as np
import pytest

from tests.support.errors import refused
from vit_jax import config, fields
from vit_jax.fields import Field


@pytest.mark.parametrize(
    ('values', 'right', 'wrong'),
    [
        (fields.whole(1), (1, np.int32(7), 2**31 - 1), (0, 2**31, 1.0, True, None, '1')),
        (fields.whole(1, or_else=-1), (-1, 2), (0, -2)),
        (
            fields.number(0, below=1),
            (0, 0.5, np.float32(0.25)),
            (1, -1e-9, float('nan'), True, '0'),
        ),
        (fields.number(above=0), (1e-9, 3), (0, float('inf'), -1)),
        (fields.one_of('a', 'b'), ('a',), ('c', '', None)),
        (fields.several(fields.whole(1), 'sizes', 2), ((1, 2), [3, 4]), ((1,), (1, 0), 1, None)),
        (fields.SWITCH, (True, False), (0, 1, None)),
        (fields.TEXT, ('', 'a'), (1, None, b'a')),
        (fields.SIDES, ((224,), (224, 160)), ((0, 1), (10**6,))),
    ],
)
def test_possible_and_impossible_values(values, right, wrong):
    assert all(map(values.fit, right))
    assert not any(map(values.fit, wrong))


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        (fields.whole(1), 'a whole number, at least 1'),
        (fields.whole(0, 9), 'a whole number, at least 0 and at most 9'),
        (fields.number(), 'a finite number'),
        (fields.number(above=0), 'a finite number, above 0'),
        (fields.number(0, below=1), 'a number, at least 0 and below 1'),
    ],
)
def test_expected_values_in_words(values, words):
    assert values.words == words


@pytest.mark.parametrize(
    ('given', 'read'),
    [
        ('a,b', ('a', 'b')),
        ('a, b,', ('a', 'b')),
        (('a,b', 'c'), ('a', 'b', 'c')),
        (['a'], ('a',)),
        ('', ()),
        (('',), ()),
        ((1, 2.5), (1, 2.5)),
        (224, 224),
        (None, None),
    ],
)
def test_texts_with_commas_become_tuples(given, read):
    for values in (fields.TEXTS, fields.several(fields.one_of('a', 'b'), 'some'), fields.SIDES):
        assert values.normalize(given) == read


def test_single_text_keeps_its_commas():
    assert fields.TEXT.normalize('a,b') == fields.TEXT.parse('a,b') == 'a,b'


@pytest.mark.parametrize(
    ('values', 'text', 'value'),
    [
        (fields.whole(1), '7', 7),
        (fields.whole(1), '0xff', 255),
        (fields.number(), '1e-3', 1e-3),
        (fields.number(), '3', 3.0),
        (fields.one_of('a', 'b'), 'b', 'b'),
        (fields.SWITCH, 'true', True),
        (fields.SWITCH, 'False', False),
        (fields.SWITCH, '1', True),
        (fields.SIDES, '224', (224,)),
        (fields.SIDES, '224, 160', (224, 160)),
        (fields.SIDES, '(224,)', (224,)),
        (fields.SIDES, '[224,160]', (224, 160)),
        (fields.TEXTS, '(\'a\', "b")', ('a', 'b')),
        (fields.TEXTS, 'a,b', ('a', 'b')),
        (fields.TEXTS, '', ()),
        (fields.several(fields.number(0, 1), 'shares'), '0,0.5', (0.0, 0.5)),
        (config.FIELDS['loss.class_weights'].values, 'balanced', ('balanced',)),
        (config.FIELDS['loss.class_weights'].values, '1,0.5', (1.0, 0.5)),
    ],
)
def test_text_is_parsed_to_the_type_of_its_field(values, text, value):
    parsed = fields.read('x', values, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ('values', 'text'),
    [
        (fields.whole(1), ''),
        (fields.whole(1), '1.5'),
        (fields.whole(1), '0'),
        (fields.number(), 'many'),
        (fields.number(), '1,2'),
        (fields.SWITCH, 'yes'),
        (fields.SIDES, '1.5'),
        (fields.SIDES, '8,x'),
    ],
)
def test_unparsable_text_is_refused_with_the_expected_values(values, text):
    with refused(kind='value', field='side') as error:
        fields.read('side', values, text)
    assert values.words in str(error.value)


def test_every_default_can_be_parsed_from_its_text_in_the_help():
    for name, field in config.all_fields().items():
        if field.default is dataclasses.MISSING:
            continue
        default = field.default
        text = ','.join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert fields.parse(name, field.values, text) == default


def test_assignments_may_share_a_text():
    given = ['mean=0,0.5,1,fit=squash', 'fit=cover', 'resize']
    assert fields.assignments(given) == {'mean': '0,0.5,1', 'fit': 'cover', 'resize': ''}
    assert fields.assignments([]) == {}


def test_fields_whose_values_may_contain_commas():
    with_commas = {name for name, field in config.FIELDS.items() if field.values.has_commas}
    assert {
        'image_size',
        'preprocess.std',
        'transfer.take',
        'dataset.name',
        'optimizer.lr_factors',
    } <= with_commas
    assert not with_commas & {'seed', 'optimizer.learning_rate', 'augment.flip', 'loss.name'}


def test_impossible_value_is_refused_with_the_expected_values():
    table = {
        'depth': Field(1, fields.whole(1), 'layers'),
        'pool': Field('gap', fields.one_of('gap', 'map'), 'mean'),
    }
    fields.check(table, {'depth': 2, 'pool': 'map'})
    with refused(kind='value', field='model.depth', value=0) as error:
        fields.check(table, {'depth': 0, 'pool': 'map'}, 'model.')
    assert str(error.value) == 'model.depth is 0: expected a whole number, at least 1.'
    with refused(kind='value', field='depth', value=10**21) as error:
        fields.check(table, {'depth': 10**21, 'pool': 'map'})
    assert str(error.value).endswith(', and at most 2,147,483,647.')  # the limit that it exceeds
    with refused(kind='choice', field='pool', value='mpa'):
        fields.check(table, {'depth': 1, 'pool': 'mpa'})


def test_fields_are_collected_from_a_dataclass():
    @dataclasses.dataclass
    class Block:
        depth: Annotated[int, fields.whole(1), 'layers']
        name: str
        rate: Annotated[float, fields.RATE, 'of dropout'] = 0.5

    table = fields.declared(Block, prefix='block.')
    assert table == {
        'block.depth': Field(dataclasses.MISSING, fields.whole(1), 'layers')._replace(
            values=table['block.depth'].values
        ),
        'block.rate': Field(0.5, fields.RATE, 'of dropout'),
    }
    assert list(fields.markdown(table))[2:] == [
        '| `block.depth` |  | a whole number, at least 1 | layers |',
        '| `block.rate` | `0.5` | a number, at least 0 and at most 0.9999999 | of dropout |',
    ]
    assert fields.text(table).splitlines()[2:] == [
        '  --config.block.rate=0.5',
        '        of dropout (a number, at least 0 and at most 0.9999999)',
    ]


def test_recorded_value_may_be_in_the_range_of_an_earlier_version():
    values = fields.number(least=0.1, most=10, or_else=0, earlier=fields.number(least=0))
    for value in (0, 0.1, 10):
        assert values.fits(value)
        assert values.fits(value, recorded=True)
    for value in (1e-300, 0.05, 11, 1e308):
        assert not values.fits(value)
        assert values.fits(value, recorded=True)
    for value in (-1, float('nan'), '1', True):
        assert not values.fits(value, recorded=True)
    weights = fields.several(values, 'weights')
    assert not weights.fits([1e-40, 1])
    assert weights.fits([1e-40, 1], recorded=True)
    table = {'rate': Field(0.5, values, 'of something')}
    fields.check(table, {'rate': 1e-300}, recorded=True)
    with refused(kind='value', field='rate', value=1e-300):
        fields.check(table, {'rate': 1e-300})
