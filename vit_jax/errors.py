"""Errors that a user can mend, the checks that raise them, and how errors are reported."""

import contextlib
import difflib
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence

log = logging.getLogger(__name__)


# Characters that a terminal obeys or that change the order of text, and halves of characters, by
# which Python stands for bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile(
    r'[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]'
)

LONGEST = 1000  # characters of a line of a message: damaged files have names of any length


class UserError(Exception):
    """Something the user can mend; commands print its message without a traceback.

    Of a line of more than LONGEST characters the middle is left out; there may be many lines, as
    when all broken images are listed.
    """

    def __init__(self, message: str):
        super().__init__('\n'.join(map(_shortened, message.split('\n'))))


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
    left_out, half = len(line) - LONGEST, LONGEST // 2
    return (
        line if left_out <= 0 else (f'{line[:half]} [... {left_out} characters ...] {line[-half:]}')
    )


class DivergedError(UserError):
    """Training produced values that are not finite."""


class MissingDataError(UserError):
    """A data set is not on this machine, or not in a version that can be opened."""


class Inapplicable(UserError):
    """What was asked for does not exist for this model or with these arguments."""


def report(error: BaseException) -> None:
    """Logs the error that ends a command; as one message if a user can mend it."""
    text = str(error)
    if isinstance(error, BrokenPipeError) and error.filename is None:  # as `| head -1` does it
        text = f'{error.strerror}: what reads the output has closed it.'
    if isinstance(error, (UserError, OSError)):  # OSError: a file that cannot be read or written
        log.error('error: %s', text)
    elif isinstance(error, ModuleNotFoundError):
        log.error("error: %s. Training needs more packages: pip install -e '.[train]'", text)
    elif isinstance(error, RuntimeError) and 'RESOURCE_EXHAUSTED' in text:  # JAX's
        log.error(
            'error: out of memory: %s\nLower the batch size or the image size. In training '
            '--config.accum_steps=0 splits the batch into parts that fit, and on a GPU '
            '--config.model.remat_policy=products keeps less.',
            text.partition('\n')[0].removeprefix('RESOURCE_EXHAUSTED: '),
        )
    else:
        log.error('stopped by an unexpected error', exc_info=error)


def nearest_names(name: str, valid: Iterable[str]) -> str:
    """'Did you mean b16, l16? ', or '' when no valid name is similar, in whatever case it is."""
    given, names = str(name).replace('/', ''), {}
    for one in sorted(set(valid), key=lambda x: (x not in given, x)):  # 'G14' before 'g14'
        names.setdefault(one.lower(), []).append(one)
    close = difflib.get_close_matches(given.lower(), names, n=3, cutoff=0.5)
    near = [one for lower in close for one in names[lower]][:3]
    return f'Did you mean {", ".join(near)}? ' if near else ''


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
            f'{field} is {value!r}. {nearest_names(value, valid)}It is one of: {", ".join(valid)}.'
        )


def check_at_least(field: str, value: int, least: int) -> None:
    """Raises UserError unless `value` of `field` is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise UserError(f'{field} is {value}: expected a whole number, at least {least}.')


def is_utf8(name: str) -> bool:
    """Whether the name of a file, of any bytes in Python's way, can be written as text."""
    return name.encode(errors='replace').decode() == name


def rename_or_locale() -> str:
    """What to do about names that `is_utf8` refuses: rename them, or set another locale."""
    encoding = sys.getfilesystemencoding()
    if encoding == 'utf-8':
        return 'Rename them.'
    return (
        f'Python reads names of files as {encoding} here, because of the locale: set PYTHONUTF8=1, '
        'or LC_ALL=C.UTF-8, and run the same command again.'
    )


def composed(name: str) -> str:
    """The name in Unicode's normal form NFC.

    An accented letter is one character or a letter and a mark, which look the same. macOS and some
    archives write the second form (NFD). Names that differ in this alone are compared by NFC.
    """
    return unicodedata.normalize('NFC', name)


def check_names(where: str, given: Iterable[str], needed: Iterable[str]) -> None:
    """Raises UserError unless exactly the needed fields are given; names the nearest field."""
    given, needed = list(given), sorted(needed)
    for name in given:
        if name not in needed:
            raise UserError(
                f'{where} has no field {name!r}. {nearest_names(name, needed)}'
                f'Its fields are: {", ".join(needed)}.'
            )
    if missing := [name for name in needed if name not in given]:
        raise UserError(
            f'{where} lacks {", ".join(missing)}: start from a name, as in '
            "models.fields('b16') or models.fields('r50x1'), and change fields."
        )


def check_destination(path: str, *endings: str, folder: bool = False) -> None:
    """Raises UserError unless `path`, with one of `endings`, is in a directory, and is none itself.

    With `folder`, the path may be a directory that exists. Called before the work, so that nothing
    is computed that cannot be written.
    """
    if os.path.isdir(path) and not folder:
        raise UserError(f'{path} cannot be written: it is a directory. Name a file.')
    if not os.path.isdir(os.path.dirname(path) or '.'):
        raise UserError(f'{path} cannot be written: there is no directory {os.path.dirname(path)}.')
    special = os.path.exists(path) and not os.path.isfile(path)  # as a pipe, written itself
    place = path if special else os.path.dirname(os.path.realpath(path))
    if not os.access(place, os.W_OK):
        raise UserError(
            f'{path} cannot be written: {place} is read-only, or of another user. Name '
            'a path that can be written.'
        )
    if not path.endswith(endings or ''):
        raise UserError(f'{path} cannot be written: expected a name that ends in {endings[0]}.')


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """An OSError in this context becomes a UserError that names `path`, which is being written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f'{path} cannot be written ({error.strerror or error}). Mend that and run '
            'the same command again.'
        ) from error


@contextlib.contextmanager
def writing(path: str) -> Iterator[str]:
    """The name of a new file, which takes the place of `path` when all is written, and not before.

    Of what is no file, such as a pipe, it is `path` itself. Errors are `named`.
    """
    special = os.path.exists(path) and not os.path.isfile(path)
    target = os.path.realpath(path)  # a link stays one
    temporary = path if special else f'{target}.tmp'
    try:
        with named(path):
            yield temporary
            if not special:
                os.replace(temporary, target)
    finally:
        if not special:
            with contextlib.suppress(OSError):
                os.remove(temporary)
