"""The error that a user can mend, and what its messages have in common."""

import difflib


class UserError(Exception):
    """Something the user can mend; entry points print its message without a traceback."""


class DivergedError(UserError):
    """Training came to values that are not finite."""


def nearest_names(name: str, valid: list[str]) -> str:
    """'Did you mean b16, l16? ' or '' when no valid name is near."""
    near = difflib.get_close_matches(str(name).replace('/', ''), valid, n=3, cutoff=0.5)
    return f'Did you mean {", ".join(near)}? ' if near else ''


def check_choice(field: str, value: str, valid: tuple[str, ...]) -> None:
    """Raises UserError unless `value` of `field` is one of `valid`."""
    if value not in valid:
        raise UserError(f'{field} is {value!r}. {nearest_names(value, list(valid))}'
                        f'It is one of: {", ".join(valid)}.')
