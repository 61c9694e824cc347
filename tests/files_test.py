"""Whole files, special files, file names and the cache folder."""

import json
import os
import pathlib
import socket
import sys

import pytest

from tests.support.errors import refused
from vit_jax import files


def make_pipe(path):
    os.mkfifo(path)


def make_device(path):
    path.symlink_to('/dev/zero')


@pytest.mark.parametrize('make', [pathlib.Path.mkdir, make_pipe, make_device])
@pytest.mark.parametrize('read', [files.read_text, files.read_bytes])
def test_only_regular_files_are_read(make, read, tmp_path):
    make(tmp_path / 'x')
    with pytest.raises(OSError, match='it is not a regular file'):
        read(tmp_path / 'x')
    with refused(kind='unreadable', file=tmp_path / 'x'):
        files.read_json(str(tmp_path / 'x'), dict)
    with refused(kind='unreadable', file=tmp_path / 'x'):
        files.require_file(str(tmp_path / 'x'))


def test_special_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    os.mkfifo('pipe')
    pathlib.Path('file').touch()
    pathlib.Path('broken').symlink_to('nowhere')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind('socket')
        kinds = {
            'pipe': 'a named pipe',
            'socket': 'a socket',
            '/dev/null': 'a device',
            '.': 'a directory',
            'file': '',
            'broken': '',
            'nothing': '',
            'a\0b': '',
        }
        for path, kind in kinds.items():
            assert files.special_kind(path) == kind
            assert files.is_special(path) == bool(kind)


def test_reading_a_missing_file_raises_file_not_found(tmp_path):
    for read in (files.read_text, files.read_bytes):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / 'x')


def test_read_bytes_can_stop_early(tmp_path):
    (tmp_path / 'x').write_bytes(b'abc')
    assert files.read_bytes(tmp_path / 'x') == b'abc'
    assert files.read_bytes(tmp_path / 'x', 2) == b'ab'


def test_json_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / 'x.json')
    files.write_json(path, {'a': [1, 'é']})
    assert files.read_json(path, dict) == {'a': [1, 'é']}


@pytest.mark.parametrize('content', [b'', b'{"seed": ', b'[' * 10**5, b'{"a": "\xe9"}'], ids=repr)
def test_damaged_json_is_refused(content, tmp_path):
    path = tmp_path / 'x.json'
    path.write_bytes(content)
    with refused(kind='unreadable', file=path):
        files.read_json(str(path), dict)


def test_json_of_another_type_is_refused_with_its_value(tmp_path):
    path = tmp_path / 'x.json'
    path.write_text('[1]')
    with refused(kind='content', file=path, value=[1]) as error:
        files.read_json(str(path), dict)
    assert str(error.value) == f'{path} contains [1]: expected an object. Restore the file.'


def test_value_that_json_cannot_represent_leaves_the_old_file(tmp_path):
    path = tmp_path / 'x.json'
    files.write_json(str(path), {'a': [1, 2]})
    with pytest.raises(TypeError):
        files.write_json(str(path), {'a': object()})
    assert json.loads(path.read_text()) == {'a': [1, 2]}


def test_full_disk_leaves_only_the_old_file(tmp_path, limited_files):
    path = tmp_path / 'x.json'
    files.write_json(str(path), [1])
    with limited_files(100), refused(kind='unwritable', file=path):
        files.write_json(str(path), list(range(1000)))
    assert list(tmp_path.iterdir()) == [path]
    assert files.read_json(str(path), list) == [1]


def test_file_is_replaced_only_after_everything_is_written(tmp_path):
    path = tmp_path / 'x'
    link = tmp_path / 'link'
    path.write_text('old')
    link.symlink_to(path)

    def fill(name):
        with files.writing(name) as temporary:
            pathlib.Path(temporary).write_text('ne')
            raise OSError(28, 'No space left')

    for name in (path, link):
        with refused(kind='unwritable', file=name) as error:
            fill(str(name))
        assert str(error.value) == (
            f'{name} cannot be written (No space left). '
            'Fix the cause and run the same command again.'
        )
        assert path.read_text() == 'old'
    with files.writing(str(link)) as temporary:
        pathlib.Path(temporary).write_text('new')
    assert link.is_symlink()
    assert path.read_text() == 'new'
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_special_file_is_written_in_place():
    with files.writing('/dev/null') as temporary:
        assert temporary == '/dev/null'


def test_content_is_on_disk_before_the_file_gets_its_name(tmp_path, monkeypatch):
    calls = []
    original_replace = os.replace

    def replace(source, target):
        calls.append('replace')
        original_replace(source, target)

    monkeypatch.setattr(os, 'fsync', lambda _: calls.append('fsync'))
    monkeypatch.setattr(os, 'replace', replace)
    files.write_text(str(tmp_path / 'x'), 'a')
    assert calls == ['fsync', 'replace']


def test_processes_that_share_a_path_use_different_temporary_files(tmp_path):
    path = str(tmp_path / 'x')
    with (
        files.written_whole(path, is_shared=True) as first,
        files.written_whole(path, is_shared=True) as second,
    ):
        assert first != second
        pathlib.Path(first).write_text('a')
        pathlib.Path(second).write_text('a')
    assert [p.name for p in tmp_path.iterdir()] == ['x']


def test_destination_must_be_in_an_existing_directory(tmp_path):
    files.check_destination(str(tmp_path / 'x.npz'), '.npz')
    files.check_destination(str(tmp_path), folder=True)
    for path in (tmp_path, tmp_path / 'a/b', tmp_path / 'x'):
        with refused(kind='unwritable', file=path):
            files.check_destination(str(path), '.npz')


def test_read_only_directory_is_no_destination(tmp_path, monkeypatch):
    """A pipe in a read-only directory can still be written.

    os.access is replaced because tests may run as root, who may write everywhere.
    """
    link = tmp_path / 'link'
    folder = tmp_path / 'folder'
    folder.mkdir()
    link.symlink_to(folder / 'x')
    os.mkfifo(folder / 'pipe')
    monkeypatch.setattr(os, 'access', lambda path, mode: mode == os.W_OK and path != str(folder))
    files.check_destination(str(tmp_path / 'y'))
    files.check_destination(str(folder / 'pipe'))
    for path in (link, folder / 'x'):
        with refused(kind='unwritable', file=path) as error:
            files.check_destination(str(path))
        assert f'{folder} is read-only' in str(error.value)


def test_pipe_of_another_program_is_a_destination():
    """Its real path, /proc/PID/fd/pipe:[NUMBER], does not exist."""
    reading, writing = os.pipe()
    files.check_destination(f'/dev/fd/{writing}')
    os.close(writing)
    os.close(reading)


def test_directory_of_an_option_is_created_unless_it_is_a_file(tmp_path):
    path = tmp_path / 'new' / 'folder'
    files.make_directory(str(path), '--out')
    files.make_directory(str(path), '--out')
    assert path.is_dir()
    (path / 'file').write_text('x')
    with refused('unwritable', field='--out', file=path / 'file'):
        files.make_directory(str(path / 'file'), '--out')
    with refused('unwritable', file=path / 'file' / 'below'):
        files.make_directory(str(path / 'file' / 'below'), '--out')


def test_cache_is_in_the_home_directory_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('XDG_CACHE_HOME', '')
    assert files.cache_folder('weights') == tmp_path / '.cache/vit_jax/weights'
    monkeypatch.setenv('XDG_CACHE_HOME', '/else')
    assert files.cache_folder('a', 'b') == pathlib.Path('/else/vit_jax/a/b')


def test_user_without_a_home_must_set_the_cache_folder(monkeypatch):
    def no_home():
        raise RuntimeError('Could not determine home directory.')

    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setattr(pathlib.Path, 'home', no_home)
    with refused(kind='missing', field='XDG_CACHE_HOME'):
        files.cache_folder()


@pytest.mark.parametrize(('encoding', 'advice'), [('utf-8', 'Rename'), ('ascii', 'PYTHONUTF8=1')])
def test_advice_on_names_depends_on_the_locale(encoding, advice, monkeypatch):
    monkeypatch.setattr(sys, 'getfilesystemencoding', lambda: encoding)
    assert advice in files.rename_or_locale()


def test_is_utf8():
    assert files.is_utf8('é')
    assert not files.is_utf8('\udcfe')


def test_letter_and_accent_are_composed():
    assert files.composed('cafe\u0301') == 'caf\u00e9'


def test_error_while_writing_names_the_file():
    with refused(kind='unwritable', file='x'), files.named('x'):
        raise OSError(122, 'Disk quota exceeded')
