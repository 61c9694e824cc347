"""JSON beside and inside of weights: read within limits, and checked against a layout's schema.

A schema is a msgspec.Struct; keys that it does not have are left alone.
"""

import collections
import json
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from vit_jax.errors import UserError
from vit_jax.files import read_bytes

LARGEST_FILE = 32 << 20  # bytes; the names of 21,843 classes, both ways, are 2 MB

# Far above what anyone has published. What is built from a size takes no memory before arrays of
# that size have been found.
Size = Annotated[int, Meta(ge=1, le=1_000_000)]
Layers = Annotated[int, Meta(ge=1, le=1000)]
Sides = (
    Annotated[int, Meta(ge=1, le=16_384)]
    | Annotated[list[Annotated[int, Meta(ge=1, le=16_384)]], Meta(min_length=1, max_length=2)]
)
Epsilon = Annotated[float, Meta(ge=0, le=1)]
Ratio = Annotated[float, Meta(ge=0.01, le=1)]
# Of channels; for values in 0..255 instead of 0..1 means and deviations are larger.
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
    """The object in a JSON file; UserError if it cannot be read or is anything else."""
    try:
        text = read_bytes(path, LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(
            f'{path} cannot be read: {error.strerror or error}.', kind='unreadable', file=path
        ) from error
    if len(text) > LARGEST_FILE:
        raise UserError(
            f'{path} has more than {LARGEST_FILE >> 20} MiB: expected the few lines '
            'that describe a model.'
        )
    return parse(text, path)


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """The object that JSON describes; `where` begins the message of the UserError if none is."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be shown
    except (ValueError, RecursionError) as error:
        raise UserError(
            f'{where} cannot be read as JSON ({str(error):.120}): copy or download it again.'
        ) from error
    if not isinstance(value, dict):
        raise UserError(f'{where} holds {shown(value)}: expected an object, {{...}}.')
    return value


def checked(schema: type[Schema], value: dict, where: str) -> Schema:
    """`value` as the schema has it; UserError with the field, its value and what is expected."""
    try:
        return msgspec.convert(value, schema, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(' - at ')
        path, found = path.split('`$')[-1].rstrip('`').partition('[...]')[0], value
        for key, index in re.findall(r'\.(\w+)|\[(\d+)\]', path):
            found = found[key] if key else found[int(index)]
        expected = re.sub(r'`|, got .*', '', message).replace('Expected ', 'expected ')
        expected = re.sub(
            r'\b(int|float|str|array|object|bool)\b|\|', lambda match: _WORDS[match[0]], expected
        )
        raise UserError(
            f'{where}: {path.lstrip(".") or "the object"} is {shown(found)}: '
            f'{expected}. Mend the file, or download it again.'
        ) from error


def _unique(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, count),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'{name!r} stands there {count} times')
    return found


def _refuse_constant(name):
    raise ValueError(f'{name} is not a number')


def shown(value: Any) -> str:
    """The beginning of a value as JSON has it."""
    return f'{json.dumps(value):.80}'
