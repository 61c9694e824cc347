"""Grids: which fields a sweep changes, and the values that it tries."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.campaigns.outcome import RATE
from vit_jax.errors import UserError


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
    texts = {}
    others = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, is_joined, text = argument.partition('=')
        field = re.sub(r'^--?config\.', '', name)
        is_separate = field != name and not is_joined and bool(remaining)  # --config.FIELD VALUE
        if is_separate:
            text = remaining[0]
        is_field = field != name and field in fields
        if not is_field or fields[field].values.has_commas or ',' not in text:
            others.append(argument)
            continue
        if field in texts:
            raise _given_twice(name)
        texts[field] = text
        if is_separate:
            del remaining[0]
    for field in texts:
        name = f'--config.{field}'
        if any(re.fullmatch(rf'--?config\.{re.escape(field)}(=.*)?', other) for other in others):
            raise _given_twice(name)
    return texts, others


def _given_twice(option):
    return UserError(f'{option} is given twice: give it once, with all its values.')


def texts_of(
    grid: Mapping[str, Sequence[Any]] | None, file: str, arguments: Sequence[str]
) -> dict[str, str]:
    """The texts 'A,B,...' of the grid that a config file brings.

    Args:
      grid: what get_grid of the file returns; None if the file has no such function.
      file: FILE[:ARGUMENT] of --config, for messages.
      arguments: the other arguments of the command, which must not set a field of the grid.

    Raises:
      UserError: if the file has no grid, or an argument gives one value to a field of the grid.
    """
    need = (
        f'a sweep needs a field with two values or more, as in --config.{RATE}=0.003,0.01. '
        'Commas in fields of several values and in text belong to one value'
    )
    if grid is None or all(len(values) < 2 for values in grid.values()):
        raise UserError(f'{need}. {file} has no grid of its own.')
    names = {argument.partition('=')[0] for argument in arguments}
    for field, values in grid.items():
        if f'--config.{field}' in names:
            path = file.partition(':')[0]
            raise UserError(
                f'{need}; --config.{field} has one. Without it the grid of {path} is '
                f'taken: {", ".join(map(str, values))}.'
            )
    return {field: ','.join(map(str, values)) for field, values in grid.items()}


def read(texts: Mapping[str, str], config: ConfigDict) -> dict[str, list[Any]]:
    """The values of 'A,B,...' for each field, numbers in rising order.

    Args:
      texts: by dotted field, as `separate` returns them.
      config: which has these fields.

    Raises:
      UserError: if a field has fewer than two values, or a text is not a value of its field.
    """
    grid, known = {}, config_lib.flatten(config)
    for field, text in texts.items():
        values = [config_lib.parse_value(field, value, known) for value in text.split(',')]
        values = list(dict.fromkeys(values))
        if len(values) < 2:
            raise UserError(
                f'--config.{field}={text} has one value, {values[0]}: a sweep needs '
                'two or more, with commas between them.'
            )
        if not isinstance(values[0], str):
            values.sort()
        grid[field] = values
    return grid


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The members of a sweep, each with one of the values of every field."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
