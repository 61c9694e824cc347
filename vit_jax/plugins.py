"""Functions and classes of a user's package, which a config names as PACKAGE.MODULE:NAME.

In: the value of a field. Out: the function or class. Imports errors.
"""

import importlib
from collections.abc import Callable, Iterable

from vit_jax.errors import UserError, nearest_names


def imported(name: str, field: str, known: Iterable[str]) -> Callable:
    """Imports the function or class that a field of the config names.

    Args:
      name: PACKAGE.MODULE:NAME.
      field: name of the field, for messages.
      known: the other values that the field can have.

    Raises:
      UserError: if the name has another form, or the module or its function is missing.
    """
    module_name, colon, attribute = name.partition(':')
    if not colon or not attribute.isidentifier():
        raise UserError(
            f'{field} is {name!r}. {nearest_names(name, known)}Expected one of '
            f'{", ".join(known)}, or PACKAGE.MODULE:NAME.',
            kind='choice',
            field=field,
            value=name,
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f'{field} is {name!r}, and {module_name} cannot be imported ({error}). Python searches '
            'the current directory, PYTHONPATH and the installed packages.',
            kind='unknown',
            field=field,
            value=name,
        ) from error
    if not callable(getattr(module, attribute, None)):
        raise UserError(
            f'{field} is {name!r}, and {module_name} has no function {attribute!r}.',
            kind='unknown',
            field=field,
            value=name,
        )
    return getattr(module, attribute)
