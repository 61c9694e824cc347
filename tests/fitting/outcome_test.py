"""An outcome counts what it says."""

import numpy as np
import pytest

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
    assert found.classes[-1] == ('y', 1.0, 1)
