"""A check that a model's fields are complete and have no misspelt names."""

from collections.abc import Iterable

from vit_jax.errors import UserError, nearest_names


def check_field_names(section: str, names: Iterable[str], expected: Iterable[str]) -> None:
    """Raises UserError unless `names` are exactly the expected names.

    Args:
      section: start of the message, 'model' or 'model.resnet'.
      names: names of the fields to check.
      expected: names of all fields of the model. The message proposes the nearest one.
    """
    names = list(names)
    expected = sorted(expected)
    for name in names:
        if name not in expected:
            raise UserError(
                f'{section} has no field {name!r}. {nearest_names(name, expected)}'
                f'Its fields are: {", ".join(expected)}.',
                kind='unknown',
                field=section,
                value=name,
            )
    missing = [name for name in expected if name not in names]
    if missing:
        raise UserError(
            f'{section} lacks {", ".join(missing)}: start from a name, as in '
            "models.fields('b16') or models.fields('r50x1'), and change fields.",
            kind='missing',
            field=f'{section}.{missing[0]}',
        )
