"""What a field of a config is: a default, the values that it may have, and its meaning.

In: declarations, in config_fields.py as a table and in models/ beside the fields of modules. Out:
values of texts, checks, and the text of --help and of docs/config.md. Imports errors.

The command line, sweeps and lists of numbers are read by `read` and `assignments` alone.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vit_jax.errors import UserError, check_choice

MOST = 2**31 - 1  # of whole numbers: steps are counted in 32 bits
# Of other numbers. float32 holds 1.2e-38 to 3.4e38; products and quotients of two need room.
SMALLEST = 1e-30
LARGEST = 1e30


def _as_given(value):
    return value


class Values(NamedTuple):
    """The values that a field may have."""

    words: str  # as in 'expected a whole number, at least 1'
    fit: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    limit: str = ''  # said of values beyond it
    has_commas: bool = False  # a value may have commas: they cannot stand between values
    parse: Callable[[str], Any] = str  # a text -> the value; raises ValueError if it is none
    normalize: Callable[[Any], Any] = _as_given  # a value of a config file -> as it is checked
    recorded: Callable[[Any], bool] | None = None  # what earlier versions accepted; None: `fit`

    def fits(self, value: Any, recorded: bool = False) -> bool:
        """Whether a field may have the value, in a new run or in what a run has `recorded`."""
        if recorded and self.recorded is not None:
            return bool(self.recorded(value))
        return bool(self.fit(value))


class Field(NamedTuple):
    """A field of a config."""

    default: Any
    values: Values
    meaning: str


def whole(least: int, most: int = MOST, or_else: int | None = None) -> Values:
    """Whole numbers of a range, and one value besides."""
    words = f'a whole number, at least {least}' + (f' and at most {most:,}' if most < MOST else '')
    return Values(
        words + ('' if or_else is None else f', or {or_else}'),
        lambda x: (
            isinstance(x, numbers.Integral)
            and not isinstance(x, bool)
            and (least <= int(x) <= most or x == or_else)
        ),
        limit=f', and at most {MOST:,}' if most == MOST else '',
        parse=_parse_whole,
    )


def _parse_whole(text):
    """Also of hexadecimal digits, as in 0xff."""
    is_hexadecimal = text.strip().lower().startswith('0x')
    return int(text, 16 if is_hexadecimal else 10)


def number(
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    or_else: float | None = None,
    earlier: Values | None = None,
) -> Values:
    """Numbers of a range, and one value besides, which float32 can compute with.

    They are 0 or of a size from SMALLEST to LARGEST. `earlier` is the wider range of earlier
    versions, whose runs may have recorded other values; None: the same range, of any size.
    """
    limits = {'at least': least, 'above': above, 'at most': most, 'below': below}
    said = ' and '.join(
        f'{word} {limit:.7g}' for word, limit in limits.items() if limit is not None
    )
    finite = '' if most is not None or below is not None else 'finite '

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

    return Values(
        f'a {finite}number'
        + (f', {said}' if said else '')
        + ('' if or_else is None else f', or {or_else:.7g}'),
        fit,
        limit=f', and 0 or of a size from {SMALLEST:g} to {LARGEST:g}',
        parse=float,
        recorded=earlier.recorded if earlier else is_in_range,
    )


def one_of(*choices: str) -> Values:
    """One of some words."""
    return Values(' | '.join(choices), lambda x: x in choices, choices)


def several(each: Values, plural: str, count: int | None = None) -> Values:
    """A tuple of values, which `plural` names, of any length unless `count` is given.

    They are read from one text, or from texts, with commas between them.
    """
    return Values(
        plural,
        lambda x: (
            isinstance(x, (tuple, list))
            and (count is None or len(x) == count)
            and all(map(each.fit, x))
        ),
        has_commas=True,
        recorded=lambda x: (
            isinstance(x, (tuple, list))
            and (count is None or len(x) == count)
            and all(each.fits(element, recorded=True) for element in x)
        ),
        parse=lambda text: tuple(map(each.parse, _elements(text))),
        normalize=split_at_commas,
    )


def _elements(text):
    """'1, 2' and "('a', 'b')" as the texts of their elements, without quotes; none of ''."""
    inside = text.strip()
    for first, last in ('()', '[]'):
        if inside.startswith(first) and inside.endswith(last):
            inside = inside[1:-1]
    return split_at_commas([part.strip(' \'"') for part in inside.split(',')])


def split_at_commas(value: Any) -> Any:
    """A text, or a tuple or list in which texts may be, as a tuple of values without commas.

    'a, b' and ('a,b',) are ('a', 'b'). Empty texts are left out, so that '' is (). Anything else,
    such as a number, is returned as it is.
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
    """True, t and 1, or False, f and 0, in any case."""
    values = dict.fromkeys(('true', 't', '1'), True) | dict.fromkeys(('false', 'f', '0'), False)
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


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
    """The fields of dataclasses that are annotated as Annotated[TYPE, VALUES, MEANING], by name."""
    return {
        prefix + f.name: Field(f.default, *f.type.__metadata__)
        for c in classes
        for f in dataclasses.fields(c)
        if hasattr(f.type, '__metadata__')
    }


def check(
    table: Mapping[str, Field], values: Mapping[str, Any], prefix: str = '', recorded: bool = False
) -> None:
    """Raises UserError unless the values of all fields that the table has are possible.

    Where they are `recorded` by a run, those that earlier versions accepted are possible, too.
    """
    for name, field in table.items():
        _check_value(prefix + name, field.values, values[name], values[name], recorded)


def _check_value(name, possible, value, given, recorded=False):
    """Raises UserError, which shows what was given, unless the value is a possible one."""
    if possible.choices and isinstance(value, str):
        check_choice(name, value, possible.choices)
    elif not possible.fits(value, recorded):
        is_in_range = possible.recorded is None or possible.recorded(value)
        limit = possible.limit if is_in_range and _is_beyond(value) else ''
        raise UserError(
            f'{name} is {given!r}: expected {possible.words}{limit}.',
            kind='value',
            field=name,
            value=given,
        )


def parse(name: str, values: Values, text: str) -> Any:
    """The value that a text has for a field, which need not be a possible one.

    Raises UserError if the text has none, as 'many' for a number.
    """
    try:
        return values.parse(text)
    except ValueError:
        raise UserError(
            f'{name} is {text!r}: expected {values.words}.', kind='value', field=name, value=text
        ) from None


def read(name: str, values: Values, text: str) -> Any:
    """The possible value of a field that a text has; UserError with the name if it has none."""
    value = parse(name, values, text)
    _check_value(name, values, value, text)
    return value


def assignments(given: Iterable[str]) -> dict[str, str]:
    """{'mean': '0,0,0', 'fit': 'squash'} of ['mean=0,0,0,fit=squash'], by name.

    A comma ends a value if NAME= follows. The last value of a name counts. A name without a value
    has ''.
    """
    values = {}
    for several_fields in given:
        for assignment in re.split(r',(?=\w+=)', several_fields):
            name, _, text = assignment.partition('=')
            values[name] = text
    return values


def _is_beyond(value):
    """Whether a number is larger or smaller than the computation can bear, in any field."""
    if isinstance(value, int):
        return abs(value) > MOST
    is_finite = isinstance(value, float) and math.isfinite(value)
    return is_finite and value != 0 and not SMALLEST <= abs(value) <= LARGEST


def text(table: Mapping[str, Field]) -> str:
    """A line for every field, for --help."""
    return '\n'.join(
        f'  --config.{name}={_value(field.default)}\n        {field.meaning} ({field.values.words})'
        for name, field in table.items()
    )


def markdown(table: Mapping[str, Field]) -> Iterable[str]:
    """The lines of a table with a row for every field."""
    yield from ('| field | default | values | meaning |', '|---|---|---|---|')
    for name, field in table.items():
        default = f'`{_value(field.default)}`' if _value(field.default) else ''
        cells = [f'`{name}`', default, field.values.words, field.meaning]
        yield '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'


def _value(default) -> str:
    """A default as one writes it on the command line; '' where the model's name decides."""
    if default is dataclasses.MISSING:
        return ''
    return ','.join(map(str, default)) if isinstance(default, tuple) else str(default)
