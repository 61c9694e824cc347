"""Cases of a test, of which some are tried more often than others."""

from collections.abc import Container, Sequence
from typing import Any

import pytest


def nightly_but(often: Container, cases: Sequence) -> list[Any]:
    """The cases, in their order; those that are not in `often` are tried at night alone.

    A case that is a tuple has a value for each argument of the test.
    """
    return [case if case in often else _marked(case) for case in cases]


def _marked(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
