"""The worst class, and the classes without images, in words."""

import numpy as np
import pytest

from vit_jax.evaluators.per_class import PerClass, from_sums, from_table, missing_classes


def test_the_worst_class_is_named_with_its_images():
    scores = PerClass(
        ['a', 'b', 'c', 'd'], np.array([0.5, 0.25, 0.25, np.nan]), np.array([4, 4, 8, 0])
    )
    assert scores.worst() == "worst class 'c': 25.00 % of 8 images"  # ties: the larger class
    assert scores.missing() == 'no images of 1 of 4 classes: d'
    assert scores.count() == '3 of 4 classes'


def test_nothing_is_said_of_what_is_not_missing():
    scores = PerClass(['a', 'b'], np.array([0.5, 1.0]), np.array([4, 4]))
    assert scores.missing() == ''
    assert scores.count() == '2 classes'
    nothing = PerClass(['a', 'b'], np.array([np.nan, np.nan]), np.array([0, 0]))
    assert nothing.worst() == ''


def test_many_classes_stay_one_short_text():
    names = [f'class {number} {"x" * 200}' for number in range(1000)]
    text = missing_classes(names[1:], 1000)
    assert text.startswith('no images of 999 of 1000 classes: class 1 x')
    assert text.endswith('and 996 more')
    assert len(text) < 300
    scores = PerClass(names, np.zeros(1000), np.ones(1000))
    assert len(scores.worst()) < 120


def test_scores_of_sums():
    sums = {
        'count': 6.0,
        'class_count': np.array([4.0, 0.0, 2.0]),
        'class_correct': np.array([3.0, 0.0, 2.0]),
    }
    scores = from_sums(sums, ['a', 'b', 'c'])
    assert scores.lowest() == ('a', 0.75, 4)
    assert scores.without_images() == ['b']
    rows = {
        'logits': np.array([[1.0, 0.0], [0.0, 1.0]]),
        'label': np.array([[True, False], [True, False]]),
    }
    scores = from_sums({'count': 2.0, 'rows': rows}, ['a', 'b'])
    assert scores.lowest() == ('a', pytest.approx(1.0), 2)
    assert scores.without_images() == ['b']
    assert from_sums({'count': 2.0}, ['a', 'b']) is None  # hidden patches are predicted


def test_scores_of_a_table():
    table = {
        'a': {'accuracy': 0.5, 'num_examples': 2},
        'b': {'accuracy': None, 'num_examples': 0},
    }
    scores = from_table(table)
    assert scores.lowest() == ('a', 0.5, 2)
    assert scores.without_images() == ['b']
