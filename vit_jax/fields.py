"""Declarations of config fields: the default, the possible values and the meaning of each field.

In: declarations, in config_fields.py as a table and in models/ next to the fields of the modules.
Out: values parsed from text, checks, and the text of --help and of docs/reference/config.md.
Imports errors.

The command line, sweeps and lists of numbers parse text with `parse`, `read` and `assignments`.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vit_jax.errors import UserError, check_choice

MOST = 2**31 - 1  # largest integer: steps are counted in 32 bits
# Range of the magnitude of other numbers. float32 covers 1.2e-38 to 3.4e38; the margin leaves room
# for products and quotients of two of them.
SMALLEST = 1e-30
LARGEST = 1e30


def _unchanged(value):
    return value


class Values(NamedTuple):
    """The values that a field may have.

    Attributes:
      words: a noun phrase for messages, as in 'expected a whole number, at least 1'.
      fit: tells whether a new run may use the value.
      choices: the possible words, if the field is a choice.
      limit: a text that follows `words` in messages about values beyond the numeric range.
      has_commas: whether one value may contain commas, which then cannot separate several values.
      parse: converts text to a value; raises ValueError if it cannot.
      normalize: converts a value from a config file to the form that `fit` checks.
      recorded: tells whether a run of an earlier version may have recorded the value; None: `fit`
        decides.
    """

    words: str
    fit: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    limit: str = ''
    has_commas: bool = False
    parse: Callable[[str], Any] = str
    normalize: Callable[[Any], Any] = _unchanged
    recorded: Callable[[Any], bool] | None = None

    def fits(self, value: Any, recorded: bool = False) -> bool:
        """Tells whether a field may have the value, in a new run or in a `recorded` config."""
        if recorded and self.recorded is not None:
            return bool(self.recorded(value))
        return bool(self.fit(value))


class Field(NamedTuple):
    """A field of a config."""

    default: Any
    values: Values
    meaning: str


def whole(least: int, most: int = MOST, or_else: int | None = None) -> Values:
    """Integers from `least` to `most`, and optionally one value outside that range."""

    def fit(x):
        if isinstance(x, bool) or not isinstance(x, numbers.Integral):
            return False
        return least <= int(x) <= most or x == or_else

    words = f'a whole number, at least {least}'
    limit = ''
    if most < MOST:
        words += f' and at most {most:,}'
    elif most == MOST:
        limit = f', and at most {MOST:,}'
    if or_else is not None:
        words += f', or {or_else}'
    return Values(words, fit, limit=limit, parse=_parse_whole)


def _parse_whole(text):
    """Parses an integer, decimal or hexadecimal as in 0xff."""
    if text.strip().lower().startswith('0x'):
        return int(text, 16)
    return int(text)


def number(
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    or_else: float | None = None,
    earlier: Values | None = None,
) -> Values:
    """Numbers within bounds, and optionally one value outside them.

    Each number is 0 or has a magnitude from SMALLEST to LARGEST, so that float32 can compute with
    it.

    Args:
      least: inclusive lower bound.
      most: inclusive upper bound.
      above: exclusive lower bound.
      below: exclusive upper bound.
      or_else: one more possible value.
      earlier: the wider range of values that runs of earlier versions may have recorded; None: the
        same bounds with any magnitude.
    """

    def is_in_range(x):
        if isinstance(x, bool) or not isinstance(x, numbers.Real):
            return False
        if not isinstance(x, numbers.Integral) and not math.isfinite(x):
            return False
        return (
            (least is None or x >= least)
            and (above is None or x > above)
            and (most is None or x <= most)
            and (below is None or x < below)
        )

    def fit(x):
        if is_in_range(x):
            return x == 0 or SMALLEST <= abs(x) <= LARGEST
        is_number = isinstance(x, numbers.Real) and not isinstance(x, bool)
        return is_number and or_else is not None and x == or_else

    words = 'a number'
    if most is None and below is None:
        words = 'a finite number'
    bounds = {'at least': least, 'above': above, 'at most': most, 'below': below}
    limits = [f'{word} {bound:.7g}' for word, bound in bounds.items() if bound is not None]
    if limits:
        words += ', ' + ' and '.join(limits)
    if or_else is not None:
        words += f', or {or_else:.7g}'
    recorded: Callable[[Any], bool] | None = is_in_range
    if earlier is not None:
        recorded = earlier.recorded
    limit = f', and 0 or of a magnitude from {SMALLEST:g} to {LARGEST:g}'
    return Values(words, fit, limit=limit, parse=float, recorded=recorded)


def one_of(*choices: str) -> Values:
    """One of the given words."""
    return Values(' | '.join(choices), lambda x: x in choices, choices)


def several(each: Values, plural: str, count: int | None = None) -> Values:
    """A tuple of values, of any length unless `count` is given.

    The tuple is parsed from one text with commas, or from several such texts.

    Args:
      each: the possible elements.
      plural: a noun phrase for messages, as in 'expected three numbers'.
      count: the required length.
    """

    def are_values(x, recorded):
        if not isinstance(x, (tuple, list)):
            return False
        if count is not None and len(x) != count:
            return False
        return all(each.fits(element, recorded) for element in x)

    return Values(
        plural,
        lambda x: are_values(x, recorded=False),
        has_commas=True,
        recorded=lambda x: are_values(x, recorded=True),
        parse=lambda text: tuple(map(each.parse, _elements(text))),
        normalize=split_at_commas,
    )


def _elements(text):
    """Returns the elements of '1, 2' or "('a', 'b')" as texts without quotes; () for ''."""
    inside = text.strip()
    for first, last in ('()', '[]'):
        if inside.startswith(first) and inside.endswith(last):
            inside = inside[1:-1]
    return split_at_commas([part.strip(' \'"') for part in inside.split(',')])


def split_at_commas(value: Any) -> Any:
    """Splits a text, or the texts in a tuple or list, at commas; returns a tuple.

    Both 'a, b' and ('a,b',) become ('a', 'b'). Empty texts are dropped, so '' becomes (). Any other
    value, such as a number, is returned unchanged.
    """
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (tuple, list)):
        return value
    values: list[object] = []
    for element in value:
        if isinstance(element, str):
            parts = [part.strip() for part in element.split(',')]
            values.extend(part for part in parts if part)
        else:
            values.append(element)
    return tuple(values)


def _parse_switch(text):
    """Parses true, t or 1, and false, f or 0, in any case."""
    lower = text.lower()
    if lower in ('true', 't', '1'):
        return True
    if lower in ('false', 'f', '0'):
        return False
    raise ValueError(text)


SWITCH = Values('True or False', lambda x: isinstance(x, bool), parse=_parse_switch)
TEXT = Values('text', lambda x: isinstance(x, str), has_commas=True)
TEXTS = several(TEXT, 'names, with commas between them')
RATE = number(least=0, most=0.9999999, earlier=number(least=0, below=1))  # 1 - RATE is not 0
SIDES = several(
    whole(1, 2**16),
    'one or two whole numbers, height and width, at least 1 and at '
    'most 65,536, as in 224 or 224,160',
)


def declared(*classes: type, prefix: str = '') -> dict[str, Field]:
    """Collects the fields of dataclasses that are annotated as Annotated[TYPE, VALUES, MEANING].

    Args:
      classes: the dataclasses; their fields without such an annotation are ignored.
      prefix: a text before each name, such as 'model.'.

    Returns:
      The fields by name.
    """
    table = {}
    for dataclass in classes:
        for field in dataclasses.fields(dataclass):
            if hasattr(field.type, '__metadata__'):
                table[prefix + field.name] = Field(field.default, *field.type.__metadata__)
    return table


def check(
    table: Mapping[str, Field], values: Mapping[str, Any], prefix: str = '', recorded: bool = False
) -> None:
    """Checks the value of every field in a table.

    Args:
      table: the fields by name.
      values: the values by the same names.
      prefix: a text before the names in messages.
      recorded: whether a run has recorded the values. Values that earlier versions accepted are
        then possible as well.

    Raises:
      UserError: if a value is impossible.
    """
    for name, field in table.items():
        _check_value(prefix + name, field.values, values[name], values[name], recorded)


def _check_value(name, possible, value, shown, recorded=False):
    """Raises UserError unless the value is possible; the message shows the value as `shown`."""
    if possible.choices and isinstance(value, str):
        check_choice(name, value, possible.choices)
    elif not possible.fits(value, recorded):
        is_in_range = possible.recorded is None or possible.recorded(value)
        words = possible.words
        if is_in_range and _is_beyond(value):
            words += possible.limit
        raise UserError(
            f'{name} is {shown!r}: expected {words}.', kind='value', field=name, value=shown
        )


def parse(name: str, values: Values, text: str) -> Any:
    """Parses the text of a field; the value is not checked.

    Raises:
      UserError: if the text has no value of the field's type, such as 'many' for a number.
    """
    try:
        return values.parse(text)
    except ValueError:
        raise UserError(
            f'{name} is {text!r}: expected {values.words}.', kind='value', field=name, value=text
        ) from None


def read(name: str, values: Values, text: str) -> Any:
    """Parses the text of a field and checks the value.

    Raises:
      UserError: if the text is not a possible value of the field.
    """
    value = parse(name, values, text)
    _check_value(name, values, value, text)
    return value


def assignments(texts: Iterable[str]) -> dict[str, str]:
    """Splits ['mean=0,0,0,fit=squash'] into {'mean': '0,0,0', 'fit': 'squash'}.

    A comma ends a value if NAME= follows. The last value of a name wins. A name without a value
    gets ''.
    """
    values = {}
    for text in texts:
        for assignment in re.split(r',(?=\w+=)', text):
            name, _, value = assignment.partition('=')
            values[name] = value
    return values


def _is_beyond(value):
    """Tells whether a number is outside the numeric range of every field."""
    if isinstance(value, int):
        return abs(value) > MOST
    if not isinstance(value, float) or not math.isfinite(value):
        return False
    return value != 0 and not SMALLEST <= abs(value) <= LARGEST


def text(table: Mapping[str, Field]) -> str:
    """Returns two lines for every field, for --help."""
    return '\n'.join(
        f'  --config.{name}={_text_of(field.default)}\n'
        f'        {field.meaning} ({field.values.words})'
        for name, field in table.items()
    )


def markdown(table: Mapping[str, Field]) -> Iterable[str]:
    """Yields the lines of a Markdown table with a row for every field."""
    yield '| field | default | values | meaning |'
    yield '|---|---|---|---|'
    for name, field in table.items():
        default = _text_of(field.default)
        if default:
            default = f'`{default}`'
        cells = [f'`{name}`', default, field.values.words, field.meaning]
        yield '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'


def _text_of(default) -> str:
    """Returns a default as on the command line; '' if the model's name decides it."""
    if default is dataclasses.MISSING:
        return ''
    if isinstance(default, tuple):
        return ','.join(map(str, default))
    return str(default)
