import numpy as np
import pytest

from tests.evaluators.probes_test import CLASSES, clusters
from tests.support.errors import refused
from vit_jax.evaluators import fewshot, probes

NAMES = ('ant', 'bee', 'cat', 'dog', 'elk')


def test_draws_have_n_examples_of_each_class_and_larger_draws_include_smaller_ones():
    train = clusters(200)
    small = fewshot.draw(train, CLASSES, 2, seed=3)
    large = fewshot.draw(train, CLASSES, 5, seed=3)
    for drawn, shots in [(small, 2), (large, 5)]:
        np.testing.assert_array_equal(np.bincount(drawn.labels), [shots] * CLASSES)
        assert len(np.unique(drawn.values, axis=0)) == shots * CLASSES
    rows = {row.tobytes() for row in large.values}
    assert {row.tobytes() for row in small.values} < rows
    other = fewshot.draw(train, CLASSES, 5, seed=4)
    assert {row.tobytes() for row in other.values} != rows


def test_draws_equal_big_vision():
    """big_vision's fewshot_lsr.py permutes the indices of each class with one generator."""
    train, rng = clusters(100), np.random.default_rng(7)
    expected = [rng.permutation(np.where(train.labels == k)[0])[:4] for k in range(CLASSES)]
    np.testing.assert_array_equal(
        fewshot.draw(train, CLASSES, 4, seed=7).values, train.values[np.concatenate(expected)]
    )


def test_rows_are_means_over_seeds():
    train, test = clusters(150), clusters(80, seed=1)
    rows = list(fewshot.compare(train, test, CLASSES, (1, 5), 3, (1.0, 1024.0)))
    assert [(row['shots'], row['method'], row['l2'], len(row['accuracies'])) for row in rows] == [
        (shots, method, l2, 3 if shots else 1)
        for shots in (1, 5, None)
        for method, l2 in (
            ('least squares', 1.0),
            ('least squares', 1024.0),
            ('nearest prototype', None),
            ('20 nearest', None),
            ('linear probe', None),
        )
        if not (shots and 'probe' in method)
    ]
    alone = [
        np.mean(
            probes.least_squares(
                fewshot.draw(train, CLASSES, 5, seed), test.values, CLASSES, (1024.0,)
            )[0].argmax(1)
            == test.labels
        )
        for seed in range(3)
    ]
    assert rows[5]['accuracies'] == alone
    assert rows[5]['accuracy'] == pytest.approx(np.mean(alone))
    assert rows[5]['deviation'] == pytest.approx(np.std(alone, ddof=1))
    assert fewshot.metrics(train, test, CLASSES, (1, 5), 3, 1024.0) == {
        '1shot': rows[1]['accuracy'],
        '1shot_deviation': rows[1]['deviation'],
        '5shot': rows[5]['accuracy'],
        '5shot_deviation': rows[5]['deviation'],
    }
    assert list(fewshot.metrics(train, test, CLASSES, [5], 1, 1024.0)) == ['5shot']
    lines = fewshot.table(rows).splitlines()
    assert [line.split()[0] for line in lines] == ['shots', '1', '5', 'all']
    assert len(set(map(len, lines[:1] + lines[3:]))) == 1
    assert f'{100 * rows[5]["accuracy"]:.2f} ± {100 * rows[5]["deviation"]:.2f}' in lines[2]


def test_every_class_needs_its_examples():
    labels = np.repeat(np.arange(CLASSES), [10, 4, 10, 3, 10])
    fewshot.check_examples(labels, NAMES, (1, 3), 'DIR, train,')
    with refused('value', value=5) as error:
        fewshot.check_examples(labels, NAMES, (5, 1), 'DIR, train,')
    assert str(error.value) == (
        '5 shots are more than DIR, train, has of 2 of 5 classes: bee (4), dog (3). Use at most 3 '
        'shots, or a larger split.'
    )
    with refused('content') as error:
        fewshot.check_examples(np.repeat(np.arange(4), 9), NAMES, (1,), 'DIR, train,')
    assert 'no example of 1 of 5 classes: elk (0)' in str(error.value)
    with refused('content'):
        fewshot.check_examples(np.zeros(9, int), NAMES[:1], (1,), 'DIR, train,')
