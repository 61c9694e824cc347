import numpy as np
import pytest
from PIL import Image

from vit_jax.campaigns.outcome import (
    Outcome,
    as_json,
    figure,
    mean_score,
    name_of,
    notes,
    report,
    standard_error,
    table,
    text_of,
)
from vit_jax.campaigns.scores import Ranking
from vit_jax.evaluators.metric import Metric

LR = 'optimizer.learning_rate'
RATES = Outcome(
    [{LR: 1e-3}, {LR: 0.01}, {LR: 1.0}],
    [0.5, 0.25, None],
    0,
    {4: (0.625, 'a/final')},
    'val',
    'train',
    'test',
)
TWO_FIELDS = Outcome(
    [{'augment.flip': flip, 'batch_size': size} for flip in (False, True) for size in (8, 16, 32)],
    [0.1, 0.2, 0.3, 0.4, None, 0.6],
    5,
    {0: (0.5, 'a'), 1: (0.75, 'b')},
    'val',
    'train',
    'test',
)


@pytest.mark.parametrize(
    ('value', 'text'),
    [
        (1e-3, '0.001'),
        (0.0, '0'),
        (1e-7, '1e-07'),
        (1000.0, '1000'),
        (12345678, '12345678'),
        (0.99999999, '0.99999999'),
        (0.1 + 0.2, '0.3'),
        (True, 'True'),
        ('adam', 'adam'),
    ],
)
def test_text_of_a_value(value, text):
    assert text_of(value) == text


def test_names_of_members():
    """Existing workdirs have the names of learning rates. A comma would separate two values."""
    assert name_of(RATES.members[0]) == 'lr=0.001'
    assert name_of(TWO_FIELDS.members[4]) == 'augment.flip=True_batch_size=16'


def test_table_has_a_line_for_each_member():
    assert table(RATES).splitlines() == [
        '  optimizer.learning_rate  accuracy',
        '  0.001                    50.00 %   the best',
        '  0.01                     25.00 %',
        '  1                        diverges',
    ]
    assert [line.split()[:2] for line in table(TWO_FIELDS).splitlines()[1:]] == [
        [str(flip), str(size)] for flip in (False, True) for size in (8, 16, 32)
    ]


def drawn(outcome):
    """Returns the axes, and {label: (values along the axis, percentages)} of their lines."""
    (axes,) = figure(outcome).axes
    return axes, {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines
    }


def test_figure_of_one_field_has_one_line():
    axes, lines = drawn(RATES)
    assert (axes.get_xlabel(), axes.get_ylabel()) == (LR, 'accuracy (%)')
    names, accuracies = lines['on val']
    assert names == ['0.001', '0.01', '1']
    np.testing.assert_array_equal(accuracies, [50, 25, np.nan])
    assert lines['diverges'] == (['1'], [0])


def test_dollar_signs_do_not_start_formulas():
    names = [r'$\frac{$', r'$\sqrt{$']
    result = figure(
        Outcome(
            [{'dataset.name': a, 'pretrained': b} for a in names for b in names],
            [0.1, 0.2, 0.3, None],
            2,
            {0: (0.3, 'a')},
            'val',
            'train',
            'test',
        )
    )
    result.draw_without_rendering()
    assert r'pretrained $\sqrt{$ on val' in [
        text.get_text().replace(r'\$', '$') for text in result.axes[0].get_legend().get_texts()
    ]


def test_figure_has_a_line_for_each_value_of_the_other_field():
    axes, lines = drawn(TWO_FIELDS)
    assert axes.get_xlabel() == 'batch_size'
    assert lines['augment.flip False on val'] == (['8', '16', '32'], pytest.approx([10, 20, 30]))
    np.testing.assert_allclose(lines['augment.flip True on val'][1], [40, np.nan, 60])
    ((bars, _, segments),) = [(c[0], c[1], c[2][0].get_segments()) for c in axes.containers]
    assert list(bars.get_ydata()) == [62.5]
    half = 100 * np.std([0.5, 0.75], ddof=1)
    np.testing.assert_allclose(segments[0][:, 1], [62.5 - half, 62.5 + half])


def test_json_of_one_final_run_and_of_two():
    one, two = as_json(RATES, 'a'), as_json(TWO_FIELDS, 'a')
    assert (one['eval_accuracy'], one['best']) == ({'0.001': 0.5, '0.01': 0.25, '1': None}, 1e-3)
    assert (one['test_accuracy'], one['test_accuracy_mean'], one['workdir']) == (
        0.625,
        0.625,
        'a/final',
    )
    assert one['test_accuracy_deviation'] is None
    assert one['repeats'] == [{'seed': 4, 'test_accuracy': 0.625, 'workdir': 'a/final'}]
    assert two['best'] == 'augment.flip=True_batch_size=32'
    assert two['eval_accuracy']['augment.flip=True_batch_size=16'] is None
    assert (two['test_accuracy'], two['test_accuracy_mean']) == (0.5, 0.625)
    assert two['test_accuracy_deviation'] == pytest.approx(np.std([0.5, 0.75], ddof=1))


LOSSES = RATES._replace(
    scores=[0.25, 0.5, None],
    ranking=Ranking('eval/loss', Metric('loss', 'number', 'lowest', 'loss')),
)


def test_outcome_by_another_metric():
    assert table(LOSSES).splitlines()[:2] == [
        '  optimizer.learning_rate  loss',
        '  0.001                    0.2500    the best',
    ]
    axes, lines = drawn(LOSSES)
    assert axes.get_ylabel() == 'loss'
    np.testing.assert_array_equal(lines['on val'][1], [0.25, 0.5, np.nan])
    content = as_json(LOSSES, 'a')
    assert content['eval_loss'] == {'0.001': 0.25, '0.01': 0.5, '1': None}
    assert content['test_loss'] == content['test_loss_mean'] == 0.625
    assert 'eval_accuracy' not in content


def test_report_writes_a_figure_and_json(tmp_path):
    report(TWO_FIELDS, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ['sweep.json', 'sweep.png']
    assert np.asarray(Image.open(tmp_path / 'sweep.png')).shape[0] > 300


FOLD_SCORES = [[0.25, 0.5, 0.75], [0.5, 0.5, 0.5], [0.5, None, 0.5]]
CROSS_VALIDATED = RATES._replace(
    scores=[mean_score(of_member) for of_member in FOLD_SCORES],
    fold_scores=FOLD_SCORES,
    eval_split='3 folds of train',
)


def test_mean_and_standard_error_equal_numpy():
    scores = np.random.default_rng(0).random(7).tolist()
    assert mean_score(scores) == pytest.approx(np.mean(scores), rel=1e-12)
    expected = np.std(scores, ddof=1) / np.sqrt(7)
    assert standard_error(scores) == pytest.approx(expected, rel=1e-12)
    assert mean_score([0.5, None]) is None


def test_table_of_a_cross_validated_sweep_has_standard_errors():
    assert table(CROSS_VALIDATED).splitlines() == [
        '  optimizer.learning_rate  accuracy  standard error',
        '  0.001                    50.00 %   14.43 %         the best',
        '  0.01                     50.00 %   0.00 %',
        '  1                        diverges',
    ]


def test_json_of_a_cross_validated_sweep_has_all_folds():
    content = as_json(CROSS_VALIDATED, 'a')
    assert content['eval_split'] == '3 folds of train'
    assert content['eval_accuracy'] == {'0.001': 0.5, '0.01': 0.5, '1': None}
    first, _, last = content['members']
    assert first == {
        'values': {LR: 1e-3},
        'eval_accuracy': 0.5,
        'eval_accuracy_standard_error': pytest.approx(0.25 / np.sqrt(3)),
        'folds': [
            {'eval_accuracy': score, 'workdir': f'a/lr=0.001_fold={number}of3'}
            for number, score in enumerate([0.25, 0.5, 0.75], start=1)
        ],
    }
    assert last['eval_accuracy_standard_error'] is None
    assert [fold['eval_accuracy'] for fold in last['folds']] == [0.5, None, 0.5]


def test_figure_of_a_cross_validated_sweep_has_error_bars():
    (axes,) = figure(CROSS_VALIDATED).axes
    bars = {container.get_label(): container for container in axes.containers}
    segments = bars['on 3 folds of train'][2][0].get_segments()
    half = 25 / np.sqrt(3)
    np.testing.assert_allclose(segments[0][:, 1], [50 - half, 50 + half])


def test_notes_of_a_cross_validated_sweep_state_the_mean():
    texts = notes(CROSS_VALIDATED, 'a')
    assert list(texts.values()) == [
        *['the best · mean of 3 folds 50.00 %, standard error 14.43 %'] * 3,
        *['mean of 3 folds 50.00 %, standard error 0.00 %'] * 3,
        *['diverges'] * 3,
        '',
    ]
    assert next(iter(texts)) == 'a/lr=0.001_fold=1of3'
