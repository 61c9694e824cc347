"""What a test asserts of an error that a user can fix: its kind and what it is about."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from vit_jax.errors import UserError


@contextlib.contextmanager
def refused(kind: str, **expected: Any) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """A context that raises a UserError of a kind, with the attributes (field, file, value) given.

    A path may be given as a pathlib.Path.
    """
    with pytest.raises(UserError) as caught:
        yield caught
    error = caught.value
    if 'file' in expected:
        expected['file'] = str(expected['file'])
    attributes = {name: getattr(error, name) for name in expected}
    assert {'kind': error.kind, **attributes} == {'kind': kind, **expected}, str(error)
