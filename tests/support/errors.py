"""Asserts the kind and the attributes of a UserError."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from vit_jax.errors import UserError


@contextlib.contextmanager
def refused(kind: str, **expected: Any) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Asserts that the context raises a UserError of this kind.

    Args:
      kind: the expected kind.
      **expected: expected attributes: field, value, and file as a string or a pathlib.Path.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    if 'file' in expected:
        expected['file'] = str(expected['file'])
    attributes = {name: getattr(error, name) for name in expected}
    assert {'kind': error.kind, **attributes} == {'kind': kind, **expected}, str(error)
