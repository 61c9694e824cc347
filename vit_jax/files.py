"""Files: read or written whole, what is not a regular file, the names of files, and the cache.

In: paths. Out: text, bytes and JSON, or an error that names the file. Imports errors.
"""

import contextlib
import json
import os
import pathlib
import stat
import sys
import unicodedata
import uuid
from collections.abc import Iterator
from typing import Any

from vit_jax.errors import UserError

_SPECIAL = {
    stat.S_ISDIR: 'a directory',
    stat.S_ISFIFO: 'a named pipe',
    stat.S_ISSOCK: 'a socket',
    stat.S_ISCHR: 'a device',
    stat.S_ISBLK: 'a device',
}


def special_kind(path: str | os.PathLike) -> str:
    """'a directory', 'a named pipe', 'a socket' or 'a device'; '' for a file and for nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ''
    return next((kind for is_kind, kind in _SPECIAL.items() if is_kind(mode)), '')


def is_special(path: str | os.PathLike) -> bool:
    """Whether something exists at the path that is not a regular file.

    A pipe blocks its reader, and a device may never end.
    """
    return os.path.exists(path) and not os.path.isfile(path)


def require_regular(path: str | os.PathLike) -> None:
    """Raises OSError for a directory, a pipe, a socket or a device; not where nothing exists."""
    if is_special(path):
        raise OSError('it is not a regular file')


def require_file(path: str) -> None:
    """Raises UserError for something that is no file, as `require_regular`; it says what it is."""
    kind = special_kind(path)
    if kind:
        raise UserError(f'{path!r} is {kind}: expected a file.', kind='unreadable', file=path)


def read_bytes(path: str | os.PathLike, most: int = -1) -> bytes:
    """The bytes of a regular file, the first `most` of them unless `most` is negative.

    Raises OSError where it cannot be read or is not a regular file.
    """
    require_regular(path)
    with open(path, 'rb') as file:
        return file.read(most)


def read_text(path: str | os.PathLike) -> str:
    """The text of a regular file in UTF-8.

    Raises OSError as `read_bytes`, ValueError for bytes that are not UTF-8.
    """
    require_regular(path)
    with open(path, encoding='utf-8') as file:
        return file.read()


def read_json(path: str, kind: type) -> Any:
    """The dict or list (`kind`) in a JSON file.

    Raises UserError if the file cannot be read, or holds something else.
    """
    expected = 'an object' if kind is dict else 'a list'
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f'{path} cannot be read ({error}), expected {expected} of JSON: restore '
            'the file, or name another directory.',
            kind='unreadable',
            file=path,
        ) from error
    if not isinstance(value, kind):
        raise UserError(
            f'{path} holds {json.dumps(value):.80}, expected {expected}: restore the file.',
            kind='content',
            file=path,
            value=value,
        )
    return value


def write_text(path: str, text: str) -> None:
    """Writes a text file, whole or not at all; UserError where it cannot be written."""
    with writing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)


def write_json(path: str, value: Any) -> None:
    """Writes a JSON file as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + '\n')


@contextlib.contextmanager
def written_whole(path: str, is_shared: bool = False) -> Iterator[str]:
    """The name of a new file, which replaces `path` when the context ends without an error.

    The content is on the disk before it has the name, so that also a machine that fails leaves the
    old file or the new one. A link stays a link. A special file, such as a pipe, cannot be
    replaced: then the name is `path` itself.

    Args:
      is_shared: whether other processes may write the same path at the same time.
    """
    if is_special(path):
        yield path
        return
    target = os.path.realpath(path)
    suffix = uuid.uuid4().hex if is_shared else 'tmp'
    temporary = f'{target}.{suffix}'
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def _sync(path):
    """Waits until the content of a file is on the disk."""
    with open(path, 'rb') as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def writing(path: str) -> Iterator[str]:
    """As `written_whole`; an OSError becomes a UserError as in `named`."""
    with named(path), written_whole(path) as temporary:
        yield temporary


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """An OSError in this context becomes a UserError that names `path`, which is being written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f'{path} cannot be written ({error.strerror or error}). Mend that and run '
            'the same command again.',
            kind='unwritable',
            file=path,
        ) from error


def check_destination(path: str, *endings: str, folder: bool = False) -> None:
    """Raises UserError unless a file can be written to `path`.

    A command calls this before its work, so that it computes nothing that cannot be written. The
    path has one of `endings`, if there are any, and its directory exists. With `folder`, the path
    may be a directory that exists.
    """
    directory = os.path.dirname(path)
    if os.path.isdir(path) and not folder:
        problem = 'it is a directory. Name a file.'
    elif not os.path.isdir(directory or '.'):
        problem = f'there is no directory {directory}.'
    else:
        problem = _reason_not_to_write(path) or _wrong_ending(path, endings)
    if problem:
        raise UserError(f'{path} cannot be written: {problem}', kind='unwritable', file=path)


def _reason_not_to_write(path):
    """A sentence if this user has no right to write the path, else ''."""
    # A special file is written itself, any other one is replaced by a new file beside it.
    place = path if is_special(path) else os.path.dirname(os.path.realpath(path))
    if os.access(place, os.W_OK):
        return ''
    return f'{place} is read-only, or of another user. Name a path that can be written.'


def _wrong_ending(path, endings):
    if not endings or path.endswith(endings):
        return ''
    return f'expected a name that ends in {endings[0]}.'


def cache_folder(*names: str) -> pathlib.Path:
    """A folder for what can be made or downloaded again, which the user may delete at any time.

    It is vit_jax of $XDG_CACHE_HOME, else of ~/.cache; `names` lead to a folder or file in it.
    Raises UserError for a user without a home.
    """
    root: str | pathlib.Path | None = os.environ.get('XDG_CACHE_HOME')
    if not root:
        try:
            root = pathlib.Path.home() / '.cache'
        except RuntimeError as error:
            raise UserError(
                'This user has no home directory, and XDG_CACHE_HOME is not set: set it to a '
                'directory that can be written.',
                kind='missing',
                field='XDG_CACHE_HOME',
            ) from error
    return pathlib.Path(root, 'vit_jax', *names)


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
