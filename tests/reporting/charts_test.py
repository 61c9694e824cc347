import json

import numpy as np
import pytest
import vl_convert
from sklearn.metrics import confusion_matrix

from vit_jax.evaluators.calibration import calibration
from vit_jax.reporting import charts

ROWS = [
    {
        'step': k,
        'train/loss': 3 / k,
        'train/learning_rate': 1e-3,
        'train/grad_norm': 1.0,
        'train/images_per_sec': 100.0 + k,
    }
    for k in range(1, 31)
] + [
    {
        'step': k,
        'eval/loss': 2 / k,
        'eval/accuracy': k / 40,
        'eval/accuracy_top5': k / 30,
        'fewshot/5shot': 0.5,
        'fewshot/5shot_deviation': 0.1,
    }
    for k in (10, 20, 30)
]


def points(chart):
    """Returns the drawn values by (series, step)."""
    return {
        (row['series'], row['step']): row['value']
        for row in chart['spec']['layer'][0]['data']['values']
    }


def test_curves_draw_every_number():
    found = {chart['title']: chart for chart in charts.curves({'run': ROWS}, 10)}
    assert list(found) == [
        'Loss',
        'Accuracy',
        'Few-shot accuracy',
        'Learning rate',
        'Images per second',
        'Norms',
    ]
    assert points(found['Loss']) == {
        **{('training', k): 3 / k for k in range(1, 31)},
        **{('evaluation', k): 2 / k for k in (10, 20, 30)},
    }
    assert set(points(found['Few-shot accuracy'])) == {('5shot', k) for k in (10, 20, 30)}
    assert {name for name, _ in points(found['Accuracy'])} == {'top-1', 'top-5'}
    assert found['Accuracy']['summary'] == (
        'Accuracy by step. top-1: from 25.00% to 75.00%. top-5: from 33.33% to 100.00%.'
    )


def test_distilled_run_has_a_panel_of_agreement():
    rows = [row | {'train/agreement': 0.5} if 'train/loss' in row else row for row in ROWS]
    chart = charts.curves({'run': rows}, 10)[2]
    assert chart['title'] == 'Agreement with the teacher'
    assert points(chart) == {('training', k): 0.5 for k in range(1, 31)}


def test_tooltip_has_the_values_of_a_step():
    chart = charts.curves({'run': ROWS}, 10)[0]
    shown = {row['step']: row for row in chart['spec']['layer'][1]['data']['values']}
    assert shown[10] == {'step': 10, 'training': '0.3000', 'evaluation': '0.2000'}
    assert shown[11]['evaluation'] == '–'  # there is no value


def test_nine_classes_have_no_top_5():
    found = {chart['title']: chart for chart in charts.curves({'run': ROWS}, 9)}
    assert {name for name, _ in points(found['Accuracy'])} == {'top-1'}


def test_several_runs_with_nan_and_without_rows():
    odd = [{'step': 1, 'train/loss': 0.0}, {'step': 2, 'train/loss': float('nan')}]
    loss = charts.curves({'lr=0.1': ROWS, 'a[1].b': odd, 'empty': []}, 10)[0]
    assert [row['name'] for row in loss['series']] == [
        'lr=0.1: training',
        'lr=0.1: evaluation',
        'a[1].b: training',
    ]
    assert loss['series'][-1]['number'] == 1
    assert loss['spec']['layer'][0]['encoding']['y']['scale'].get('type') != 'log'
    assert charts.curves({'run': []}, 10) == []


@pytest.mark.parametrize('number', [3, 8, 9, 19])
def test_run_has_the_same_colour_in_all_charts(number):
    """Colours differ, also if a run, such as a diverged one, has no values."""
    runs = {f'run {k}': ROWS if k != 1 else ROWS[:30] for k in range(number)}
    expected = dict(zip(runs, charts.colours(number), strict=True))
    assert len(set(expected.values())) == number
    for chart in charts.curves(runs, 10):
        scale = chart['spec']['layer'][0]['encoding']['color']['scale']
        assert dict(zip(scale['domain'], scale['range'], strict=True)) == expected
    hover = charts.curves(runs, 10)[0]['spec']['layer'][1]['data']['values']
    assert [len(row) for row in hover] == [
        1 + number + (number - 1) * (k in (10, 20, 30)) for k in range(1, 31)
    ]


def test_long_series_keep_their_ends():
    rows = [(k, float(k)) for k in range(1, 100_001)]
    found = charts.thinned(rows)
    assert (found[0], found[-1]) == (rows[0], rows[-1])
    assert len(found) <= charts.MOST_POINTS + 1
    assert charts.thinned(rows[:500]) == rows[:500]


@pytest.fixture
def confusion():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 7, 200), rng.integers(0, 7, 200)
    names = [f'<b>{k}' for k in range(7)]
    sparse = {name: {} for name in names}
    for label, other in zip(labels, predicted, strict=True):
        row = sparse[names[label]]
        row[names[other]] = row.get(names[other], 0) + 1
    return names, sparse, confusion_matrix(labels, predicted)


def test_matrix_and_pairs(confusion):
    names, sparse, expected = confusion
    matrix = charts.matrix(names, sparse)
    np.testing.assert_array_equal(matrix, expected)
    found = charts.pairs(names, matrix)
    wrong = expected - np.diag(np.diag(expected))
    assert [row['images'] for row in found] == sorted(wrong.ravel(), reverse=True)[:20]
    for row in found:
        y, x = names.index(row['label']), names.index(row['predicted'])
        assert (row['images'], row['share']) == (expected[y, x], expected[y, x] / expected[y].sum())
    assert charts.pairs(names, np.eye(7, dtype=int)) == []


def test_blocks_of_a_large_matrix_keep_its_sum():
    matrix = np.random.default_rng(1).integers(0, 3, (1000, 1000))
    cells, side = charts.blocks(matrix)
    assert (cells.shape, side) == ((50, 50), 20)
    assert cells.sum() == matrix.sum()
    assert cells[3, 7] == matrix[60:80, 140:160].sum()
    cells, side = charts.blocks(matrix[:103, :103])
    assert (cells.shape, side, cells.sum()) == ((35, 35), 3, matrix[:103, :103].sum())


def test_reliability_has_the_bins_of_the_evaluator():
    rng = np.random.default_rng(2)
    confidence = rng.uniform(0, 1, 500).astype(np.float32)
    found = calibration(confidence, rng.uniform(0, 1, 500) < confidence)
    rows = charts.reliability(found['bins'])['rows']
    assert sum(row['images'] for row in rows) == 500
    for row in rows:
        inside = (confidence > row['from']) & (confidence <= row['to'])
        assert inside.sum() == row['images']


def test_every_chart_is_valid_vega_lite(confusion):
    names, sparse, expected = confusion
    found = [
        *charts.curves({'a': ROWS, 'b': ROWS}, 10),
        *charts.curves({'a': ROWS}, 10),
        charts.counts(names, [3, 1, 4, 1, 5, 9, 2]),
        charts.heat(names, expected),
        charts.reliability(calibration(np.float32([0.2, 0.9]), np.array([True, False]))['bins']),
        charts.distances([[1.0, 2.0], [3.0, 4.0]]),
    ]
    for chart in found:
        assert chart['summary']
        json.dumps(chart['spec'], allow_nan=False)
        compiled = vl_convert.vegalite_to_vega(chart['spec'])
        assert compiled['marks']
    assert charts.counts(names, [3, 1, 4, 1, 5, 9, 2])['summary'] == (
        'Training images of each class: from 1 (<b>3) to 9 (<b>5).'
    )


def test_small_speeds_and_few_steps_have_fine_ticks():
    """With whole numbers only, 2.1 and 2.4 images/s would both be 2."""
    rows = [{'step': k, 'train/images_per_sec': 2 + k / 10} for k in (1, 2, 3)]
    spec = charts.curves({'run': rows}, 10)[0]['spec']
    assert spec['layer'][0]['encoding']['y']['axis']['format'] == '~g'
    assert spec['encoding']['x']['axis']['tickMinStep'] == 1
