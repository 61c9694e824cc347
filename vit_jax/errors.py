"""Errors that a user can fix, the checks that raise them, and how errors are reported."""

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

log = logging.getLogger(__name__)


# Characters that a terminal obeys or that change the order of text, and halves of characters, by
# which Python stands for bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile(
    r'[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)

LONGEST = 1000  # characters of a line of a message: damaged files have names of any length
SMALLER_IMAGES = 'Lower the batch size or the image size.'


Kind = Literal[
    'choice',  # a value that is none of the possible words
    'value',  # a value of another type, or out of the range of a field
    'unknown',  # a name that does not exist
    'missing',  # a field, file or option that is needed and not there
    'unreadable',  # a file that cannot be read
    'unwritable',  # a file or directory that cannot be written
    'content',  # a file that holds something other than expected
    'conflict',  # a run or file that is there already, in use or different
    'resource',  # the machine lacks memory, threads or open files
    'diverged',
    'missing_data',
    'inapplicable',
    'other',
]


class UserError(Exception):
    """Something the user can fix; commands print its message without a traceback.

    Of a line of more than LONGEST characters the middle is left out; there may be many lines, as
    when all broken images are listed.

    Attributes:
      kind: what is wrong, for programs and tests; they need not read the message.
      field: the field or option that the message names, None if it names none.
      file: the path of the file or directory that the message names, None if it names none.
      value: the value that was refused, None if there is none.
    """

    kind: Kind = 'other'  # of a class; an error may have another one

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
    """The text with control characters escaped, ESC as '\\x1b', except those in `keep`.

    Names of files and classes may have any characters, and a terminal obeys some of them.
    """
    return _UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text
    )


def one_line(name: str) -> str:
    """A name as `printable` has it, without line breaks and tabs."""
    return printable(name, keep='')


class Formatter(logging.Formatter):
    """A formatter of log lines that are `printable`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, with its traceback if it has one."""
        return printable(super().format(record))


def _shortened(line):
    left_out = len(line) - LONGEST
    if left_out <= 0:
        return line
    half = LONGEST // 2
    return f'{line[:half]} [... {left_out} characters ...] {line[-half:]}'


class DivergedError(UserError):
    """Training produced values that are not finite."""

    kind = 'diverged'


class MissingDataError(UserError):
    """A data set is not on this machine, or not in a version that can be opened."""

    kind = 'missing_data'


class Inapplicable(UserError):
    """What was asked for does not exist for this model or with these arguments."""

    kind = 'inapplicable'


def report(error: BaseException) -> None:
    """Logs the error that ends a command; as one message if a user can fix it.

    Notes of an error of JAX (`error.add_note`) are further advice of the command.
    """
    text = str(error)
    if isinstance(error, BrokenPipeError) and error.filename is None:  # as `| head -1` does it
        text = f'{error.strerror}: what reads the output has closed it.'
    if isinstance(error, (UserError, OSError)):  # OSError: a file that cannot be read or written
        log.error('error: %s', text)
    elif isinstance(error, ModuleNotFoundError):
        log.error("error: %s. Training needs more packages: pip install -e '.[train]'", text)
    elif isinstance(error, RuntimeError) and "can't start new thread" in text:  # Python's
        log.error(
            'error: this process cannot start another thread: the limit on threads or on memory '
            'is reached. Raise it (`ulimit -u`, `ulimit -v`) and run the same command again.'
        )
    elif is_out_of_memory(error):
        log.error(
            'error: out of memory: %s\n%s',
            text.partition('\n')[0].removeprefix('RESOURCE_EXHAUSTED: '),
            ' '.join([SMALLER_IMAGES, *getattr(error, '__notes__', [])]),
        )
    else:
        log.error('stopped by an unexpected error', exc_info=error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether JAX raises the error because a device, or the host, has too little memory."""
    return isinstance(error, RuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)


def nearest_names(name: str, valid: Iterable[str]) -> str:
    """'Did you mean b16, l16? ', or '' when no valid name is similar, in whatever case it is."""
    given = str(name).replace('/', '')
    by_lower_case: dict[str, list[str]] = {}
    for candidate in sorted(set(valid), key=lambda x: (x not in given, x)):  # 'G14' before 'g14'
        by_lower_case.setdefault(candidate.lower(), []).append(candidate)
    nearest = []
    for lower in difflib.get_close_matches(given.lower(), by_lower_case, n=3, cutoff=0.5):
        nearest += by_lower_case[lower]
    if not nearest:
        return ''
    return f'Did you mean {", ".join(nearest[:3])}? '


def some(names: Sequence[str], most: int = 5, between: str = ', ') -> str:
    """The first names, and how many more there are."""
    more = f'{between.removeprefix(",")}and {len(names) - most} more' if len(names) > most else ''
    return between.join(names[:most]) + more


def counted(number: float, noun: str, plural: str = '') -> str:
    """'1 image', '1,300 images': a whole number with its noun, whose plural has an s by default."""
    if number == 1:
        return f'1 {noun}'
    return f'{number:,.0f} {plural or noun + "s"}'


def check_choice(field: str, value: str, valid: Collection[str]) -> None:
    """Raises UserError unless `value` of `field` is one of `valid`."""
    if value not in valid:
        raise UserError(
            f'{field} is {value!r}. {nearest_names(value, valid)}It is one of: {", ".join(valid)}.',
            kind='choice',
            field=field,
            value=value,
        )


def check_at_least(field: str, value: int, least: int) -> None:
    """Raises UserError unless `value` of `field` is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise UserError(
            f'{field} is {value}: expected a whole number, at least {least}.',
            kind='value',
            field=field,
            value=value,
        )
