"""Marks the cases of a test that run only at night."""

from collections.abc import Container, Sequence
from typing import Any

import pytest


def nightly_but(often: Container, cases: Sequence) -> list[Any]:
    """The cases in their order; cases that are not in `often` run only at night.

    A tuple has one value for each argument of the test.
    """
    return [case if case in often else _marked(case) for case in cases]


def _marked(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
