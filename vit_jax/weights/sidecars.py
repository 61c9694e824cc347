"""JSON files next to weights and JSON in their metadata: size limits, and checks by a schema.

A schema is a msgspec.Struct; keys that it does not have are ignored.
"""

import collections
import json
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from vit_jax.errors import UserError
from vit_jax.files import read_bytes

LARGEST_FILE = 32 << 20  # bytes; both mappings of the names of 21,843 classes take 2 MB

# Limits far above all published models. A stated size takes no memory until arrays of this size are
# found.
Size = Annotated[int, Meta(ge=1, le=1_000_000)]
Layers = Annotated[int, Meta(ge=1, le=1000)]
Sides = (
    Annotated[int, Meta(ge=1, le=16_384)]
    | Annotated[list[Annotated[int, Meta(ge=1, le=16_384)]], Meta(min_length=1, max_length=2)]
)
Epsilon = Annotated[float, Meta(ge=0, le=1)]
Ratio = Annotated[float, Meta(ge=0.01, le=1)]
# Means of channels. Files for pixels in 0..255 instead of 0..1 have larger means and deviations.
Means = Annotated[list[Annotated[float, Meta(ge=-1000, le=1000)]], Meta(min_length=1)]
Deviations = Annotated[list[Annotated[float, Meta(ge=0.001, le=1000)]], Meta(min_length=1)]

_WORDS = {
    'int': 'a whole number',
    'float': 'a number',
    'str': 'a text',
    'array': 'a list',
    'object': 'an object',
    'bool': 'true or false',
    '|': 'or',
}

Schema = TypeVar('Schema')


def read(path: str) -> dict[str, Any]:
    """The object in a JSON file; UserError if the file cannot be read or contains no object."""
    try:
        text = read_bytes(path, LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(
            f'{path} cannot be read: {error.strerror or error}.', kind='unreadable', file=path
        ) from error
    if len(text) > LARGEST_FILE:
        raise UserError(
            f'{path} has more than {LARGEST_FILE >> 20} MiB: expected the few lines '
            'that describe a model.',
            kind='content',
            file=path,
        )
    return parse(text, path)


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """The object in a JSON text; UserError, which calls the text `where`, if it is no object."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # fails for a lone surrogate
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'{where} cannot be read as JSON ({str(error):.120}): copy or download it again.',
            kind='content',
            file=where,
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f'{where} has {shown(value)}: expected an object, {{...}}.',
            kind='content',
            file=where,
            value=value,
        )
    return value


def checked(schema: type[Schema], value: dict, where: str) -> Schema:
    """`value` converted to the schema; UserError with the field, its value and the expected type.

    `where` is the name of the file for the message.
    """
    try:
        return msgspec.convert(value, schema, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(' - at ')
        path = path.split('`$')[-1].rstrip('`').partition('[...]')[0]
        field = path.lstrip('.')
        wrong_value = _at_path(value, path)
        raise UserError(
            f'{where}: {field or "the object"} is {shown(wrong_value)}: '
            f'{_in_words(message)}. Fix the file, or download it again.',
            kind='content',
            field=field or None,
            file=where,
            value=wrong_value,
        ) from error


def _at_path(value, path):
    """The part of a JSON value at a path such as '.model.sizes[2]'."""
    for key, index in re.findall(r'\.(\w+)|\[(\d+)\]', path):
        value = value[int(index)] if index else value[key]
    return value


def _in_words(message):
    """Converts 'Expected `int | null`, got `str`' to 'expected a whole number or null'."""
    expected = re.sub(r'`|, got .*', '', message).replace('Expected ', 'expected ')
    return re.sub(
        r'\b(int|float|str|array|object|bool)\b|\|', lambda match: _WORDS[match[0]], expected
    )


def _unique(pairs):
    """A dict of the pairs; ValueError if a name occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((name, count),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'{name!r} occurs {count} times')
    return values


def _refuse_constant(name):
    raise ValueError(f'{name} is not a number')


def shown(value: Any) -> str:
    """The first characters of a value as JSON."""
    return f'{json.dumps(value):.80}'
