"""Grids: which fields a sweep changes, and which values it tries."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.campaigns.outcome import RATE
from vit_jax.errors import UserError

_NEED = (
    f'a sweep needs a field with two values or more, as in --config.{RATE}=0.003,0.01. '
    'Commas in text and in fields of several values are part of one value'
)


def separate(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separates the options of swept fields from all other arguments of a command.

    Args:
      arguments: --config.FIELD=A,B,... or --config.FIELD A,B,... for a swept field.

    Returns:
      The texts 'A,B,...' by dotted field, and all other arguments in their order.

    Raises:
      UserError: if a swept field is given twice.
    """
    fields = config_lib.all_fields()
    texts: dict[str, str] = {}
    others = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, is_joined, text = argument.partition('=')
        field = re.sub(r'^--?config\.', '', name)
        if field == name or field not in fields:
            others.append(argument)
            continue
        is_separate = not is_joined and len(remaining) > 0  # --config.FIELD VALUE
        if is_separate:
            text = remaining[0]
        if fields[field].values.has_commas or ',' not in text:
            others.append(argument)
            continue
        if field in texts:
            raise _given_twice(field, text)
        texts[field] = text
        if is_separate:
            del remaining[0]
    for field, text in texts.items():
        option = rf'--?config\.{re.escape(field)}(=.*)?'
        if any(re.fullmatch(option, other) for other in others):
            raise _given_twice(field, text)
    return texts, others


def _given_twice(field, text):
    return UserError(
        f'--config.{field} is given twice: give it once, with all its values.',
        kind='value',
        field=field,
        value=text,
    )


def texts_of(
    grid: Mapping[str, Sequence[Any]] | None, file: str, arguments: Sequence[str]
) -> dict[str, str]:
    """Returns the texts 'A,B,...' of the grid of a config file, by dotted field.

    Args:
      grid: the result of get_grid of the file; None if the file has no such function.
      file: FILE[:ARGUMENT] of --config, for messages.
      arguments: the other arguments of the command, which must not set a field of the grid.

    Raises:
      UserError: if the file has no grid, or an argument gives one value to a field of the grid.
    """
    if grid is None or all(len(values) < 2 for values in grid.values()):
        raise UserError(f'{_NEED}. {file} has no grid of its own.', kind='missing', file=file)
    names = {argument.partition('=')[0] for argument in arguments}
    for field, values in grid.items():
        if f'--config.{field}' in names:
            path = file.partition(':')[0]
            raise UserError(
                f'{_NEED}; --config.{field} has one. Without this option the sweep tries the grid '
                f'of {path}: {", ".join(map(str, values))}.',
                kind='value',
                field=field,
            )
    return {field: ','.join(map(str, values)) for field, values in grid.items()}


def read(texts: Mapping[str, str], config: ConfigDict) -> dict[str, list[Any]]:
    """Parses 'A,B,...' for each field.

    Args:
      texts: texts by dotted field, as `separate` returns them.
      config: a config with these fields.

    Returns:
      The values by dotted field, numbers in rising order.

    Raises:
      UserError: if a field has fewer than two values, or a text is not a value of its field.
    """
    grid = {}
    known = config_lib.flatten(config)
    for field, text in texts.items():
        values = [config_lib.parse_value(field, value, known) for value in text.split(',')]
        values = list(dict.fromkeys(values))
        if len(values) < 2:
            raise UserError(
                f'--config.{field}={text} has one value, {values[0]}: a sweep needs '
                'two or more, with commas between them.',
                kind='value',
                field=field,
                value=text,
            )
        if not isinstance(values[0], str):
            values.sort()
        grid[field] = values
    return grid


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the members of a sweep: every combination of one value for each field."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
