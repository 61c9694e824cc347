"""Parts of a page that may be missing."""

from collections.abc import Callable
from typing import Any

import jax

from vit_jax.errors import UserError


def attempt(found: dict[str, Any], part: str, function: Callable[[], Any]) -> None:
    """Sets found[part] to what the function returns, or found['missing'][part] to why not."""
    found[part] = None
    try:
        found[part] = function()
    except (UserError, ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:
        found['missing'][part] = str(error).partition('\n')[0]  # JAX's go on, as about memory
