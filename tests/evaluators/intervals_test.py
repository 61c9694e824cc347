"""Confidence intervals against a published table."""

import pytest

from vit_jax.evaluators import intervals


def test_wilson_intervals_of_a_published_table():
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81/263, 0/20 and 29/29."""
    for correct, total, expected in (
        (81, 263, (0.2553, 0.3662)),
        (0, 20, (0.0, 0.1611)),
        (29, 29, (0.8830, 1.0)),
    ):
        assert intervals.wilson(correct, total) == pytest.approx(expected, abs=5e-5)
