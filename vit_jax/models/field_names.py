"""Whether the fields that are given for a model are those that it has."""

from collections.abc import Iterable

from vit_jax.errors import UserError, nearest_names


def check_field_names(where: str, given: Iterable[str], needed: Iterable[str]) -> None:
    """Raises UserError unless exactly the needed fields are given; it names the nearest field.

    Args:
      where: begins the message: 'model' or 'model.resnet'.
    """
    given = list(given)
    needed = sorted(needed)
    for name in given:
        if name not in needed:
            raise UserError(
                f'{where} has no field {name!r}. {nearest_names(name, needed)}'
                f'Its fields are: {", ".join(needed)}.',
                kind='unknown',
                field=where,
                value=name,
            )
    missing = [name for name in needed if name not in given]
    if missing:
        raise UserError(
            f'{where} lacks {", ".join(missing)}: start from a name, as in '
            "models.fields('b16') or models.fields('r50x1'), and change fields.",
            kind='missing',
            field=f'{where}.{missing[0]}',
        )
