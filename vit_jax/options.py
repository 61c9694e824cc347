"""Options of a function that a config names, written as NAME=VALUE,NAME=VALUE.

In: the text of a field. Out: the values that the function reads by name. Imports errors.
"""

from collections.abc import Callable
from typing import TypeVar

from vit_jax.errors import UserError, nearest_names

T = TypeVar('T')


class Options:
    """The options in one text. Each is read by name, with the default of the function."""

    def __init__(self, field: str, text: str):
        """Raises UserError for a part of the text that is no NAME=VALUE, or a name given twice.

        Args:
          field: of the config, for messages, as in 'objective.options'.
          text: its value.
        """
        self._field = field
        self._values: dict[str, str] = {}
        self._known: set[str] = set()
        for part in filter(None, (part.strip() for part in text.split(','))):
            name, equals, value = part.partition('=')
            if not equals or not name or name in self._values:
                raise UserError(
                    f'{field} is {text!r}: expected NAME=VALUE with commas between, each name once.'
                )
            self._values[name] = value

    def get_float(self, name: str, default: float) -> float:
        """The value of an option as a float."""
        return self._get(name, default, float, 'a number')

    def get_int(self, name: str, default: int) -> int:
        """The value of an option as an int."""
        return self._get(name, default, int, 'a whole number')

    def get_text(self, name: str, default: str) -> str:
        """The value of an option as a text without commas."""
        return self._get(name, default, str, 'a text')

    def _get(self, name: str, default: T, kind: Callable[[str], T], words: str) -> T:
        self._known.add(name)
        if name not in self._values:
            return default
        try:
            return kind(self._values[name])
        except ValueError:
            raise UserError(
                f'{self._field}: {name} is {self._values[name]!r}, expected {words}.'
            ) from None

    def require_all_known(self) -> None:
        """Raises UserError for an option that has not been read: it would have no effect."""
        for name in self._values:
            if name not in self._known:
                known = ', '.join(sorted(self._known)) or 'none'
                raise UserError(
                    f'{self._field} has {name!r}, which has no effect. '
                    f'{nearest_names(name, self._known)}The options are: {known}.'
                )
