"""Errors that a user can fix, the checks that raise them, and their report at the end of a command.

In: any exception, or the values to check. Out: UserErrors and one log message per error.
"""

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

log = logging.getLogger(__name__)

# Control characters, characters that change the direction of text, and the lone surrogates in file
# names that are not UTF-8.
_UNPRINTABLE = re.compile(
    r'[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)

LONGEST = 1000  # characters of a line of a message: names in damaged files can have any length
SMALLER_IMAGES = 'Lower the batch size or the image size.'
# Modules that the extra `train` of this project installs.
_TRAIN_MODULES = (
    'array_record',
    'clu',
    'jinja2',
    'matplotlib',
    'sklearn',
    'tensorboard',
    'tensorflow',
    'tensorflow_datasets',
    'tqdm',
    'vl_convert',
)


Kind = Literal[
    'choice',  # a value outside a list of words
    'value',  # a value of the wrong type, or out of the range of a field
    'unknown',  # a name that does not exist
    'missing',  # a required field, file or option is absent
    'unreadable',  # a file that cannot be read
    'unwritable',  # a file or directory that cannot be written
    'content',  # a file with unexpected content
    'conflict',  # a run or file that exists already, is in use or differs
    'resource',  # the machine lacks memory, threads, open files, a device or a connection
    'diverged',
    'missing_data',
    'inapplicable',
    'other',
]


class UserError(Exception):
    """A problem that the user can fix; commands print its message without a traceback.

    A line of more than LONGEST characters loses its middle. The number of lines has no limit: a
    message may list all broken images.

    Attributes:
      kind: the kind of problem, for programs and tests.
      field: the config field or option in the message, or None.
      file: the path of the file or directory in the message, or None.
      value: the refused value, or None.
    """

    kind: Kind = 'other'  # the default of a class; the constructor can override it

    def __init__(
        self,
        message: str,
        *,
        kind: Kind | None = None,
        field: str | None = None,
        file: str | None = None,
        value: Any = None,
    ):
        super().__init__('\n'.join(map(_shortened, message.split('\n'))))
        if kind is not None:
            self.kind = kind
        self.field = field
        self.file = None if file is None else str(file)
        self.value = value


def printable(text: str, keep: str = '\n\t') -> str:
    """Escapes control characters, for example ESC as '\\x1b', except those in `keep`.

    Names of files and classes may contain any characters, and a terminal obeys some of them.
    """

    def escaped(match):
        character = match[0]
        if character in keep:
            return character
        return ascii(character)[1:-1]

    return _UNPRINTABLE.sub(escaped, text)


def one_line(name: str) -> str:
    """Escapes control characters, line breaks and tabs included."""
    return printable(name, keep='')


class Formatter(logging.Formatter):
    """Formats log lines with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record and its traceback, if it has one."""
        return printable(super().format(record))


def _shortened(line):
    num_omitted = len(line) - LONGEST
    if num_omitted <= 0:
        return line
    half = LONGEST // 2
    return f'{line[:half]} [... {num_omitted} characters ...] {line[-half:]}'


class DivergedError(UserError):
    """Training produced values that are not finite."""

    kind = 'diverged'


class MissingDataError(UserError):
    """A data set is missing on this machine, or its version cannot be opened."""

    kind = 'missing_data'


class Inapplicable(UserError):
    """A feature does not exist for this model or with these arguments."""

    kind = 'inapplicable'


def report(error: BaseException) -> None:
    """Logs the error that ends a command, as one message if the user can fix it.

    Notes on an out-of-memory error of JAX (`error.add_note`) are the command's own advice.
    """
    message = _message_for_user(error)
    if message is None:
        log.error('stopped by an unexpected error', exc_info=error)
    else:
        log.error('error: %s', message)


def _message_for_user(error):
    """The message of an error that the user can fix; None for an unexpected error."""
    text = str(error)
    if isinstance(error, BrokenPipeError) and error.filename is None:  # as after `| head -1`
        return f'{error.strerror}: the program that reads the output has closed it.'
    if isinstance(error, (UserError, OSError)):  # OSError: a file that cannot be read or written
        return text
    if isinstance(error, ModuleNotFoundError):
        return f'{text}. {_how_to_install(error.name or "")}'
    if isinstance(error, RuntimeError) and "can't start new thread" in text:  # Python's own
        return (
            'this process cannot start another thread: the limit on threads or on memory '
            'is reached. Raise it (`ulimit -u`, `ulimit -v`) and run the same command again.'
        )
    if is_out_of_memory(error):
        summary = text.partition('\n')[0].removeprefix('RESOURCE_EXHAUSTED: ')
        advice = ' '.join([SMALLER_IMAGES, *getattr(error, '__notes__', [])])
        return f'out of memory: {summary}\n{advice}'
    return None


def _how_to_install(module):
    if module.partition('.')[0] in _TRAIN_MODULES:
        return (
            "Install it with: pip install -e '.[train]' in a clone, or with the wheel's file, "
            "pip install 'vit_jax-VERSION.whl[train]'"
        )
    return 'Install the package that contains it, or add its folder to PYTHONPATH.'


def is_out_of_memory(error: BaseException) -> bool:
    """Whether JAX raised the error because a device or the host has too little memory."""
    return isinstance(error, RuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)


def nearest_names(name: str, valid: Iterable[str]) -> str:
    """Returns 'Did you mean b16, l16? ', or '' if no valid name is similar; ignores case."""
    query = str(name).replace('/', '')
    by_lower_case: dict[str, list[str]] = {}
    for candidate in sorted(set(valid), key=lambda x: (x not in query, x)):  # 'G14' before 'g14'
        by_lower_case.setdefault(candidate.lower(), []).append(candidate)
    nearest = []
    for lower in difflib.get_close_matches(query.lower(), by_lower_case, n=3, cutoff=0.5):
        nearest += by_lower_case[lower]
    if not nearest:
        return ''
    return f'Did you mean {", ".join(nearest[:3])}? '


def some(names: Sequence[str], most: int = 5, between: str = ', ') -> str:
    """Joins the first `most` names and adds the number of further names."""
    text = between.join(names[:most])
    num_omitted = len(names) - most
    if num_omitted > 0:
        text += f'{between.removeprefix(",")}and {num_omitted} more'
    return text


def counted(number: float, noun: str, plural: str = '') -> str:
    """A whole number with its noun: '1 image', '1,300 images'. `plural` defaults to noun + 's'."""
    if number == 1:
        return f'1 {noun}'
    return f'{number:,.0f} {plural or noun + "s"}'


def check_choice(field: str, value: str, valid: Collection[str]) -> None:
    """Raises UserError unless `value` of `field` is in `valid`."""
    if value not in valid:
        raise UserError(
            f'{field} is {value!r}. {nearest_names(value, valid)}It is one of: {", ".join(valid)}.',
            kind='choice',
            field=field,
            value=value,
        )


def check_at_least(field: str, value: int, least: int) -> None:
    """Raises UserError unless `value` of `field` is an int of at least `least`."""
    if type(value) is not int or value < least:
        raise UserError(
            f'{field} is {value}: expected a whole number, at least {least}.',
            kind='value',
            field=field,
            value=value,
        )
