"""Parts of a page that may be missing."""

from collections.abc import Callable
from typing import Any

import jax

from vit_jax.errors import UserError


def attempt(content: dict[str, Any], part: str, function: Callable[[], Any]) -> None:
    """Sets content[part] to the result of a function, or content['missing'][part] to the error."""
    content[part] = None
    try:
        content[part] = function()
    except (UserError, ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:
        first_line = str(error).partition('\n')[0]  # JAX adds lines, for example about memory
        content['missing'][part] = first_line
