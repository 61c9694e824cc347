"""The photos to label next: the least certain first, in a table that a person completes."""

import csv
import os

import numpy as np
import pytest

from tests.support.datasets import write_images
from vit_jax.data import photo_table
from vit_jax.data.photo_table import Row
from vit_jax.fitting import unsure

NAMES = ['ant', 'bee', 'cat', 'dog']


def random_probabilities(count):
    return np.random.default_rng(0).dirichlet(np.ones(4), count)


def test_order_of_softmax_is_the_difference_of_the_two_highest_probabilities():
    probabilities = random_probabilities(50)
    photos = unsure.ranked([f'/{k}.png' for k in range(50)], probabilities, NAMES, False)
    sorted_rows = np.sort(probabilities)
    margins = sorted_rows[:, 3] - sorted_rows[:, 2]
    expected = sorted(range(50), key=lambda k: margins[k])
    assert [photo.file for photo in photos] == [f'/{k}.png' for k in expected]
    for k, photo in zip(expected, photos, strict=True):
        first, second = np.argsort(probabilities[k])[::-1][:2]
        assert photo.candidates == (
            (NAMES[first], probabilities[k, first]),
            (NAMES[second], probabilities[k, second]),
        )
        assert photo.margin == pytest.approx(margins[k], abs=1e-15)
        assert photo.uncertainty == pytest.approx(1 - margins[k], abs=1e-15)


def test_order_of_sigmoid_is_the_smallest_distance_from_one_half():
    probabilities = np.random.default_rng(1).uniform(size=(50, 4))
    photos = unsure.ranked([f'/{k}.png' for k in range(50)], probabilities, NAMES, True)
    distances = [min(abs(p - 0.5) for p in row) for row in probabilities.tolist()]
    expected = sorted(range(50), key=lambda k: distances[k])
    assert [photo.file for photo in photos] == [f'/{k}.png' for k in expected]
    for k, photo in zip(expected, photos, strict=True):
        nearest = sorted(range(4), key=lambda c: abs(probabilities[k, c] - 0.5))[:2]
        assert photo.candidates == tuple((NAMES[c], probabilities[k, c]) for c in nearest)
        assert photo.margin == distances[k]
        assert photo.uncertainty == pytest.approx(1 - 2 * distances[k], abs=1e-15)


def test_the_two_orders_differ():
    """Two classes at 99 % are a tie with softmax's margin; independent, both are certain."""
    probabilities = np.array([[0.99, 0.99], [0.5, 0.01]])
    files = ['/tie.png', '/half.png']
    softmax, sigmoid = (
        [photo.file for photo in unsure.ranked(files, probabilities, NAMES[:2], is_multi_label)]
        for is_multi_label in (False, True)
    )
    assert softmax == ['/tie.png', '/half.png']
    assert sigmoid == ['/half.png', '/tie.png']


def test_uncertainty_is_one_for_a_tie_and_zero_for_certainty():
    softmax = unsure.ranked(['/a', '/b'], np.array([[1.0, 0], [0.5, 0.5]]), NAMES[:2], False)
    sigmoid = unsure.ranked(['/a', '/b'], np.array([[1.0, 0], [0.5, 1]]), NAMES[:2], True)
    for photos in (softmax, sigmoid):
        assert [(photo.file, photo.uncertainty) for photo in photos] == [('/b', 1), ('/a', 0)]


def test_ties_keep_the_order_of_the_photos_and_a_photo_has_one_row():
    files = ['/c.png', '/a.png', '/x/../c.png', '/b.png']
    photos = unsure.ranked(files, np.full((4, 2), 0.5), NAMES[:2], False)
    assert [photo.file for photo in photos] == ['/c.png', '/a.png', '/b.png']


@pytest.mark.parametrize(
    ('is_multi_label', 'text', 'labels'),
    [(False, 'ant', ('ant',)), (True, 'ant;bee', ('ant', 'bee'))],
)
def test_a_table_with_labels_is_a_table_of_photos(
    is_multi_label, text, labels, tmp_path, monkeypatch
):
    write_images(tmp_path, ['new'], 3)
    monkeypatch.chdir(tmp_path)
    files = [os.path.join('new', name) for name in sorted(os.listdir('new'))]
    photos = unsure.ranked(files, random_probabilities(3), NAMES, is_multi_label)
    (tmp_path / 'elsewhere').mkdir()
    path = tmp_path / 'elsewhere' / 'next.csv'
    unsure.write(str(path), photos, is_multi_label)
    with open(path, newline='', encoding='utf-8') as file:
        header, *rows = csv.reader(file)
    assert header[:2] == ['file', 'labels' if is_multi_label else 'label']
    assert [row[1] for row in rows] == ['', '', '']
    with open(path, 'w', newline='', encoding='utf-8') as file:
        csv.writer(file).writerows([header, *([row[0], text, *row[2:]] for row in rows)])
    table = photo_table.read(str(path))
    assert table.rows == tuple(Row(photo.file, labels) for photo in photos)
    assert {row.file for row in table.rows} == {str(tmp_path / file) for file in files}


def test_one_independent_class_leaves_the_second_class_empty(tmp_path):
    path = tmp_path / 'next.csv'
    unsure.write(str(path), unsure.ranked(['/a.png'], np.array([[0.75]]), ['ant'], True), True)
    with open(path, newline='', encoding='utf-8') as file:
        (row,) = csv.DictReader(file)
    assert row == {
        'file': '/a.png',
        'labels': '',
        'uncertainty': '0.5',
        'class1': 'ant',
        'probability1': '0.75',
        'class2': '',
        'probability2': '',
        'margin': '0.25',
    }
