"""The error that a user can mend."""


class UserError(Exception):
    """Something the user can mend; entry points print its message without a traceback."""
