"""An outcome counts what it says."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from vit_jax.fitting import outcome


def test_an_outcome_counts_what_it_says():
    targets = np.eye(3, dtype=bool)[[0, 0, 1, 2, 2]]
    logits = np.log(
        np.array(
            [
                [0.8, 0.1, 0.1],
                [0.2, 0.7, 0.1],
                [0.1, 0.8, 0.1],
                [0.05, 0.05, 0.9],
                [0.9, 0.05, 0.05],
            ]
        )
    )
    found = outcome.score(list('abcde'), targets, logits, ['x', 'y', 'z'], False)
    assert found.accuracy == pytest.approx(0.6)
    assert found.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert [(m.file, m.label, m.predicted) for m in found.mistakes] == [
        ('e', 'z', 'x'),
        ('b', 'x', 'y'),
    ]
    assert found.classes == [('x', 0.5, 2, 0.5), ('z', 0.5, 2, 1.0), ('y', 1.0, 1, 0.5)]
    assert [m.label_confidence for m in found.mistakes] == pytest.approx([0.05, 0.2])
    roots = np.roots([1 + 1.96**2 / 5, -(1.2 + 1.96**2 / 5), 0.36])  # (p - a)^2 = z^2 p (1 - p) / n
    assert found.interval == pytest.approx(sorted(roots))


def test_the_calibration_error_before_is_the_error_of_the_undivided_logits():
    rng = np.random.default_rng(0)
    targets = np.eye(4, dtype=bool)[rng.integers(0, 4, 200)]
    undivided = 3 * targets + 3 * rng.normal(size=targets.shape)
    names = list('wxyz')
    before = outcome.score([''] * 200, targets, undivided, names, False)
    divided = outcome.score([''] * 200, targets, undivided / 2.5, names, False, 2.5)
    assert before.calibration_error == before.calibration_error_before
    assert divided.calibration_error_before == pytest.approx(before.calibration_error)
    assert divided.calibration_error != pytest.approx(before.calibration_error, abs=1e-3)
    assert divided.accuracy == before.accuracy
    weights = [row['num_examples'] / 200 for row in divided.bins]
    gaps = [abs(row['accuracy'] - row['confidence']) for row in divided.bins]
    assert divided.calibration_error == pytest.approx(np.dot(weights, gaps))


def test_several_labels_are_ranked_by_average_precision():
    rng = np.random.default_rng(0)
    targets = rng.uniform(size=(50, 3)) < 0.4
    logits = 2 * targets + rng.normal(size=targets.shape)
    found = outcome.score([''] * 50, targets, logits, list('xyz'), True)
    expected = average_precision_score(targets, logits, average=None)
    assert found.mean_average_precision == pytest.approx(expected.mean())
    assert [row.score for row in found.classes] == pytest.approx(sorted(expected))
    assert found.confusion is None
    first, second, *_ = outcome.lines(found, 'test')
    assert first.startswith(f'Mean average precision {100 * expected.mean():.2f} % on 50 photos')
    is_right = targets[np.arange(50), logits.argmax(axis=1)]
    assert f'right for {100 * is_right.mean():.2f} %' in second


def test_tables_of_any_names_are_written(tmp_path):
    """File names need not be UTF-8, and a spreadsheet must not compute a name."""
    targets = np.eye(2, dtype=bool)[[0, 1]]
    logits = np.array([[0.0, 1], [0, 1]])
    found = outcome.score(['\udcff.jpg', 'b.jpg'], targets, logits, ['=1+1', 'é'], False)
    outcome.write_tables(found, ['=1+1', 'é'], str(tmp_path))
    assert (tmp_path / 'mistakes.csv').read_bytes().splitlines()[1].startswith(b"\xff.jpg,'=1+1,")
    assert (tmp_path / 'confusion.csv').read_text().splitlines() == [
        "label,'=1+1,é",
        "'=1+1,0,1",
        'é,0,1',
    ]
