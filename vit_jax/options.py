"""Options of a function that a config names, written as NAME=VALUE,NAME=VALUE.

In: the text of a field. Out: the values that the function reads by name. Imports errors.
"""

from collections.abc import Callable
from typing import TypeVar

from vit_jax.errors import UserError, nearest_names

T = TypeVar('T')


class Options:
    """The options in one text. The function reads each option by name with a default."""

    def __init__(self, field: str, text: str):
        """Parses the text.

        Args:
          field: the config field, for messages, as in 'objective.options'.
          text: its value.

        Raises:
          UserError: if a part of the text is not NAME=VALUE, or a name appears twice.
        """
        self._field = field
        self._values: dict[str, str] = {}
        self._known: set[str] = set()
        for part in text.split(','):
            part = part.strip()
            if not part:
                continue
            name, equals, value = part.partition('=')
            if not equals or not name or name in self._values:
                raise UserError(
                    f'{field} is {text!r}: expected NAME=VALUE with commas between, each name '
                    'once.',
                    kind='value',
                    field=field,
                    value=text,
                )
            self._values[name] = value

    def get_float(self, name: str, default: float) -> float:
        """Returns the value of an option as a float."""
        return self._get(name, default, float, 'a number')

    def get_int(self, name: str, default: int) -> int:
        """Returns the value of an option as an int."""
        return self._get(name, default, int, 'a whole number')

    def get_text(self, name: str, default: str) -> str:
        """Returns the value of an option as a text without commas."""
        return self._get(name, default, str, 'a text')

    def _get(self, name: str, default: T, parse: Callable[[str], T], expected: str) -> T:
        self._known.add(name)
        if name not in self._values:
            return default
        text = self._values[name]
        try:
            return parse(text)
        except ValueError:
            raise UserError(
                f'{self._field}: {name} is {text!r}, expected {expected}.',
                kind='value',
                field=self._field,
                value=text,
            ) from None

    def require_all_known(self) -> None:
        """Raises UserError for an option that the function has not read: it has no effect."""
        for name in self._values:
            if name not in self._known:
                known = ', '.join(sorted(self._known)) or 'none'
                raise UserError(
                    f'{self._field} has {name!r}, which has no effect. '
                    f'{nearest_names(name, self._known)}The options are: {known}.',
                    kind='unknown',
                    field=self._field,
                    value=name,
                )
