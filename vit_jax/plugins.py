"""Functions and classes of the user's own, which a config names as PACKAGE.MODULE:NAME.

In: the value of a field. Out: what it names. Imports errors.
"""

import importlib
from collections.abc import Callable, Iterable

from vit_jax.errors import UserError, nearest_names


def imported(name: str, field: str, known: Iterable[str]) -> Callable:
    """The function or class that a field of the config names.

    Args:
      name: PACKAGE.MODULE:NAME.
      field: for messages.
      known: the other names that the field may have.

    Raises UserError if the name is of another form, or the module or what it names is not there.
    """
    module_name, colon, attribute = name.partition(':')
    if not colon or not attribute.isidentifier():
        raise UserError(
            f'{field} is {name!r}. {nearest_names(name, known)}Expected one of '
            f'{", ".join(known)}, or PACKAGE.MODULE:NAME.'
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f'{field} is {name!r}, and {module_name} cannot be imported ({error}). Modules are '
            'looked for in the current directory, in PYTHONPATH and among installed packages.'
        ) from error
    if not callable(getattr(module, attribute, None)):
        raise UserError(f'{field} is {name!r}, and {module_name} has no function {attribute!r}.')
    return getattr(module, attribute)
