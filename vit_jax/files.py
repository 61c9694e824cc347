"""Reads and writes whole files, recognises special files, checks file names, finds the cache.

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
    """Returns 'a directory', 'a named pipe', 'a socket' or 'a device'; '' for any other path."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ''
    for is_kind, kind in _SPECIAL.items():
        if is_kind(mode):
            return kind
    return ''


def is_special(path: str | os.PathLike) -> bool:
    """Whether the path exists and is not a regular file.

    A pipe blocks its reader, and a device may never end.
    """
    return os.path.exists(path) and not os.path.isfile(path)


def require_regular(path: str | os.PathLike) -> None:
    """Raises OSError for a directory, a pipe, a socket or a device, but not for a missing path."""
    if is_special(path):
        raise OSError('it is not a regular file')


def require_file(path: str) -> None:
    """Raises UserError for a directory, a pipe, a socket or a device, and names its kind."""
    kind = special_kind(path)
    if kind:
        raise UserError(f'{path!r} is {kind}: expected a file.', kind='unreadable', file=path)


def read_bytes(path: str | os.PathLike, most: int = -1) -> bytes:
    """Reads a regular file.

    Args:
      path: the file.
      most: number of bytes to read; negative: all of them.

    Raises:
      OSError: the file cannot be read or is not a regular file.
    """
    require_regular(path)
    with open(path, 'rb') as file:
        return file.read(most)


def read_text(path: str | os.PathLike) -> str:
    """Reads a regular file as UTF-8.

    Raises:
      OSError: the file cannot be read or is not a regular file.
      ValueError: the bytes are not UTF-8.
    """
    require_regular(path)
    with open(path, encoding='utf-8') as file:
        return file.read()


def read_json(path: str, kind: type) -> Any:
    """Reads a JSON file that contains a dict or a list.

    Args:
      path: the file.
      kind: the expected type, dict or list.

    Raises:
      UserError: the file cannot be read or contains another type.
    """
    expected = 'an object' if kind is dict else 'a list'
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f'{path} cannot be read ({error}): expected {expected} in JSON. Restore '
            'the file, or name another directory.',
            kind='unreadable',
            file=path,
        ) from error
    if not isinstance(value, kind):
        raise UserError(
            f'{path} contains {json.dumps(value):.80}: expected {expected}. Restore the file.',
            kind='content',
            file=path,
            value=value,
        )
    return value


def write_text(path: str, text: str) -> None:
    """Writes a text file, whole or not at all. Raises UserError if it cannot be written."""
    with writing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)


def write_json(path: str, value: Any) -> None:
    """Writes a JSON file, whole or not at all. Raises UserError if it cannot be written."""
    write_text(path, json.dumps(value, indent=2) + '\n')


@contextlib.contextmanager
def written_whole(path: str, is_shared: bool = False) -> Iterator[str]:
    """Yields the name of a temporary file that replaces `path` if the context ends without error.

    The content is on the disk before the file gets its final name, so a machine that fails leaves
    either the old file or the new one. A link stays a link. A special file, such as a pipe, cannot
    be replaced: the context then yields `path` itself.

    Args:
      path: the file to write.
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
    """Like `written_whole`, and turns an OSError into a UserError that names `path`."""
    with named(path), written_whole(path) as temporary:
        yield temporary


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Turns an OSError in this context into a UserError that names `path`, the file to write."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f'{path} cannot be written ({error.strerror or error}). Fix the cause and run '
            'the same command again.',
            kind='unwritable',
            file=path,
        ) from error


def check_destination(path: str, *endings: str, folder: bool = False) -> None:
    """Raises UserError unless a file can be written to `path`.

    Commands call this before their work, so that no result is lost.

    Args:
      path: the file to write; its directory must exist.
      *endings: the endings that the name may have; none: any name is valid.
      folder: whether the path may also be an existing directory.
    """
    directory = os.path.dirname(path)
    if os.path.isdir(path) and not folder:
        problem = 'it is a directory. Name a file.'
    elif not os.path.isdir(directory or '.'):
        problem = f'there is no directory {directory}.'
    else:
        problem = _missing_permission(path) or _wrong_ending(path, endings)
    if problem:
        raise UserError(f'{path} cannot be written: {problem}', kind='unwritable', file=path)


def make_directory(path: str, option: str) -> None:
    """Creates the directory that an option names, unless it exists.

    Raises:
      UserError: the path is a file, or the directory cannot be created.
    """
    if os.path.exists(path) and not os.path.isdir(path):
        raise UserError(
            f'{option} is {path}, which is a file: expected a directory.',
            kind='unwritable',
            field=option,
            file=path,
        )
    with named(path):
        os.makedirs(path, exist_ok=True)


def _missing_permission(path):
    """A sentence if this user may not write the path, else ''."""
    # A special file is opened itself; any other file is replaced by a new one in its directory.
    place = path if is_special(path) else os.path.dirname(os.path.realpath(path))
    if os.access(place, os.W_OK):
        return ''
    return f'{place} is read-only or belongs to another user. Name a path that can be written.'


def _wrong_ending(path, endings):
    if not endings or path.endswith(endings):
        return ''
    return f'expected a name that ends in {endings[0]}.'


def cache_folder(*names: str) -> pathlib.Path:
    """A path in the cache of this project, which the user may delete at any time.

    The cache is $XDG_CACHE_HOME/vit_jax, by default ~/.cache/vit_jax.

    Args:
      *names: the parts of the path below the cache.

    Raises:
      UserError: the user has no home directory and XDG_CACHE_HOME is not set.
    """
    root: str | pathlib.Path | None = os.environ.get('XDG_CACHE_HOME')
    if not root:
        try:
            root = pathlib.Path.home() / '.cache'
        except RuntimeError as error:
            raise UserError(
                'XDG_CACHE_HOME is not set and this user has no home directory. Set it to a '
                'directory that can be written.',
                kind='missing',
                field='XDG_CACHE_HOME',
            ) from error
    return pathlib.Path(root, 'vit_jax', *names)


def is_utf8(name: str) -> bool:
    """Whether a file name, as Python decodes it, contains only bytes of UTF-8."""
    return name.encode(errors='replace').decode() == name


def rename_or_locale() -> str:
    """Advice about names that `is_utf8` refuses: rename the files, or set another locale."""
    encoding = sys.getfilesystemencoding()
    if encoding == 'utf-8':
        return 'Rename them.'
    return (
        f'The locale makes Python read file names as {encoding}: set PYTHONUTF8=1 '
        'or LC_ALL=C.UTF-8, and run the same command again.'
    )


def composed(name: str) -> str:
    """Returns the name in Unicode's normal form NFC.

    An accented letter is either one character (NFC) or a letter and a mark (NFD), and both look the
    same. macOS and some archives write NFD.
    """
    return unicodedata.normalize('NFC', name)
