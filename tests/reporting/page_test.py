import math

import pytest

from tests.support.pages import Read, check, made, without
from vit_jax.reporting import collect, page, rendering
from vit_jax.workdir import descriptions

EVIL = '<script>alert(1)</script>'


def test_page_has_the_numbers_of_a_run():
    read, data = check(page.of_one(made()))
    for text in (
        '81.25 %',
        'step 20, the best',
        '0.4321',
        '1,234',
        '1.2 M',
        '16 × 16 pixels',
        '16 of the 16 images of test',
        'checkpoint of step 20',
        'No field differs from configs/quickstart.py',
    ):
        assert text in read.text, text
    loss = data['charts']['curve-0']['layer'][0]['data']['values']
    assert [(row['step'], row['value']) for row in loss if row['series'] == 'training'] == [
        (5, 2.0),
        (10, 1.0),
        (15, 2 / 3),
        (20, 0.5),
    ]
    confusion = next(
        table for table in read.tables if table[0][1:] == ['class 0', 'class 1', 'class 2']
    )
    assert confusion[1:] == [
        ['class 0', '1', '1', ''],
        ['class 1', '', '2', '2'],
        ['class 2', '3', '', '3'],
    ]


def test_differing_fields_have_their_meanings():
    differences = [
        {'field': 'seed', 'value': 3, 'reference': 0, 'meaning': 'random seed'},
        {'field': 'model.new', 'value': None, 'reference': [1, 2], 'meaning': ''},
    ]
    read, _ = check(page.of_one(made(differences=differences)))
    assert [
        ['field', 'run', 'recipe'],
        ['seedrandom seed', '3', '0'],
        ['model.new', '–', '1, 2'],
    ] in read.tables


@pytest.mark.parametrize(
    'names',
    [
        [EVIL, '"><img src=x onerror=alert(1)>', "' onclick='x"],
        ['{{ 7 * 7 }}', '</script><h1>', '<!--'],
        ['ä', '犬', '\u2028'],
    ],
)
def test_names_are_escaped(names):
    """Names of classes, files and runs are text, also in the data of scripts."""
    found = made(names=names, name=EVIL, workdir=f'/runs/{EVIL}')
    for source in (page.of_one(found), page.of_several([found, made(names=names)])):
        read, _ = check(source)
        assert len(read.scripts) == 3
        assert set(names) <= set(cell for table in read.tables for row in table for cell in row)
        assert '<script>alert' not in source
    assert EVIL in read.text


def test_commands_are_quoted_for_a_shell():
    found = made(workdir='/runs/of a day')
    found['predictions'] |= {'of': 32}
    read, _ = check(page.of_one(found))
    assert "python -m vit_jax.evaluate --workdir='/runs/of a day'" in read.text
    assert "python -m vit_jax.report '/runs/of a day'" in read.text


def test_page_of_a_thousand_classes():
    names = [f'n{k:05} a name with several words' for k in range(1000)]
    source = page.of_one(made(names=names))
    read, data = check(source)
    assert len(source) < 2.5e6
    cells = data['charts']['confusion']['data']['values']
    assert len(cells) <= 2500
    assert sum(row['images'] for row in cells) == sum(2 * (1 + k % 3) for k in range(1000))
    assert 'Each row and each column combines 20 neighbouring classes' in read.text
    assert len(max(read.tables, key=len)) == 1001


def test_missing_parts_have_their_reason():
    found = without(made(), 'data', 'predictions', 'inspection')
    read, data = check(page.of_one(found))
    for name in ('data', 'predictions', 'inspection'):
        assert f'no {name} here' in read.text
    assert data['explorer'] is None
    nothing = without(made(rows=[], summary=collect.summary([], 1)), *collect.PARTS)
    read, data = check(page.of_one(nothing))
    assert 'There are no rows in metrics.jsonl: the run has not written any yet' in read.text
    assert data['charts'] == {}


def test_page_of_an_unfinished_run_has_its_total_steps():
    assert '20 steps' in Read(page.of_one(made())).text
    assert '20 of 1,600 steps' in Read(page.of_one(made(num_steps=1600))).text


def test_inapplicable_figures_have_their_reason():
    inspection = {
        'filters': None,
        'similarity': None,
        'explorer': None,
        'missing': dict.fromkeys(
            ('filters', 'similarity', 'explorer'), 'a ResNet has no attention'
        ),
    }
    read, data = check(page.of_one(made(inspection=inspection)))
    assert 'Attention cannot be shown: a ResNet has no attention.' in read.text
    assert 'This figure does not apply: a ResNet has no attention.' in read.text
    assert data['explorer'] is None


def test_several_labels_have_no_confusion_matrix():
    found = made()
    predictions = found['predictions'] | {
        'several_labels': True,
        'classes': {
            name: {'average_precision': score, 'num_examples': 3}
            for name, score in zip(found['classes'], (0.25, None, 0.125), strict=True)
        },
    }
    del predictions['confusion']
    read, _ = check(page.of_one(found | {'predictions': predictions}))
    table = next(table for table in read.tables if table[0][:2] == ['class', 'average precision'])
    assert [row[:2] for row in table[1:]] == [
        ['class 2', ' 12.5 %'],
        ['class 0', ' 25.0 %'],
        ['class 1', '–'],
    ]
    assert 'Confusion' not in read.text


def test_cards_name_classes_without_images_and_the_worst_class():
    found = made()
    names = found['classes']
    classes = found['predictions']['classes']
    classes[names[0]] = {'accuracy': 0.125, 'num_examples': 8}
    classes[names[1]] = {'accuracy': None, 'num_examples': 0}
    classes[names[2]] = {'accuracy': 0.5, 'num_examples': 8}
    cards = page.cards(found)
    assert cards[0][2].endswith(
        f'; evaluation has no images of 1 of {len(names)} classes: {names[1]}'
    )
    assert ('Worst class', rendering.percent(0.125), f'{names[0]}, 8 images') in cards
    found['data']['splits'][0]['counts'][2] = 0
    assert (
        f'; training has no images of 1 of {len(names)} classes: {names[2]}'
        in page.cards(found)[0][2]
    )
    # An evaluation of some images does not show which classes the others have.
    found['predictions']['of'] += 1
    assert 'evaluation' not in page.cards(found)[0][2]
    found['data']['splits'][1]['counts'] = [0, 3, 3]
    assert page.cards(found)[0][2].endswith(f'classes: {names[0]}')


def test_page_compares_runs():
    other = made()
    other = other | {
        'name': 'other',
        'workdir': 'runs/other',
        'config': other['config'] | {'seed': 1, 'optimizer.learning_rate': 0.1},
    }
    read, data = check(page.of_several([made(), other]))
    assert 'Comparison of 2 runs' in read.text
    assert [
        ['field', 'run', 'other'],
        ['optimizer.learning_rate', '0.003', '0.1'],
        ['seed', '0', '1'],
    ] in read.tables
    results = read.tables[0]
    assert [row[0] for row in results] == ['run', 'run', 'other']
    assert results[1][1:3] == ['81.25 %', '81.25 %']
    assert {row['run'] for row in data['charts']['curve-0']['layer'][0]['data']['values']} == {
        'run',
        'other',
    }
    assert ['class', 'run', 'other'] in [table[0] for table in read.tables]
    same_name = [made(), without(made(workdir='elsewhere/run'), *collect.PARTS)]
    read, _ = check(page.of_several(same_name))
    assert [row[0] for row in read.tables[0][1:]] == ['runs/run', 'elsewhere/run']
    assert ['class 0', '50.0 %', '–'] in read.tables[-1]
    read, _ = check(page.of_several([made(), made(names=list('abc'), workdir='elsewhere/run')]))
    assert ['class', 'runs/run', 'elsewhere/run'] not in [table[0] for table in read.tables]
    assert 'All runs have the same config.' in read.text


def test_masked_patches_have_their_own_columns_and_curves():
    masked = made(workdir='runs/m')
    masked['config']['masked.target'] = 'mean_color'
    masked['metrics'] = descriptions.of_names(
        'runs/m', masked['metrics'], {'masked': {'target': 'mean_color'}}
    )
    masked['summary'] = collect.summary(masked['rows'], 128, masked['metrics'])
    heads = ['accuracy', 'right colours']
    for runs, expected in (
        ([made(), masked], [['81.25 %', '–'], ['–', '81.25 %']]),
        ([masked, masked], [[None, '81.25 %']] * 2),
        ([made(), made()], [['81.25 %', None]] * 2),
    ):
        table = check(page.of_several(runs))[0].tables[0]
        found = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
        for which in ('best', 'last'):
            assert [[row.get(f'{which} {head}') for head in heads] for row in found] == expected
    for run, title, other in (
        (masked, 'Right colours', 'Accuracy'),
        (made(), 'Accuracy', 'Right colours'),
    ):
        text = check(page.of_one(run))[0].text
        assert f'\n{title}\n' in text
        assert f'\n{other}\n' not in text


@pytest.mark.parametrize('value', [None, math.nan, math.inf, -math.inf, -5, 1e308, 10**30, True])
def test_page_of_odd_rows_can_be_made(value):
    """Another program may have written or changed metrics.jsonl."""
    run = made()
    for number, row in enumerate(run['rows']):
        for name in row:
            changed = {key: x for key, x in row.items() if key != name}
            if value is not None:
                changed[name] = value
            if name == 'step' and not isinstance(value, int):  # metrics.read refuses such a row
                continue
            rows = [*run['rows'][:number], changed, *run['rows'][number + 1 :]]
            summary = collect.summary(rows, 8)
            assert page.cards(run | {'rows': rows, 'summary': summary})
