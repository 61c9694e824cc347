"""Where onnxruntime-web comes from: a file, the cache, npm; never from anywhere unchecked."""

import base64
import hashlib
import io
import os
import pathlib
import re
import tarfile

import pytest

from tests.support.runs import ROOT
from vit_jax.errors import UserError
from vit_jax.web import runtime


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that counts as the expected one, on a machine without npm and with no cache."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:gz') as file:
        for member in (*runtime.FILES.values(), 'package/package.json'):
            info = tarfile.TarInfo(member)
            info.size = len(member)
            file.addfile(info, io.BytesIO(member.encode()))
    digest = base64.b64encode(hashlib.sha512(buffer.getvalue()).digest()).decode()
    monkeypatch.setattr(runtime, 'SHA512', digest)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    path = tmp_path / 'given.tgz'
    path.write_bytes(buffer.getvalue())
    return path


@pytest.fixture
def npm(tmp_path, package):
    """Installs an npm: what it does in Bourne shell -> the file in which it notes its arguments."""

    def install(script):
        path = tmp_path / 'bin/npm'
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
        path.chmod(0o755)
        return tmp_path / 'calls'

    return install


def expected():
    return {name: member.encode() for name, member in runtime.FILES.items()}


def test_a_file(package):
    assert runtime.read(str(package)) == expected()


def test_npm_fetches_it_once(package, npm):
    calls = npm(f'/bin/cp {package} {runtime.ARCHIVE}')
    before = sorted(os.listdir())
    for _ in range(2):
        assert runtime.read() == expected()
    assert calls.read_text().startswith(f'pack onnxruntime-web@{runtime.VERSION} --ignore-scripts')
    assert len(calls.read_text().splitlines()) == 1
    assert [path.name for path in runtime.kept_at().parent.iterdir()] == [runtime.ARCHIVE]
    assert sorted(os.listdir()) == before
    runtime.kept_at().write_bytes(b'damaged')  # is fetched again
    assert runtime.read() == expected()
    assert len(calls.read_text().splitlines()) == 2


def test_a_cache_that_cannot_be_written(package, npm, tmp_path, monkeypatch):
    npm(f'/bin/cp {package} {runtime.ARCHIVE}')
    monkeypatch.setenv('XDG_CACHE_HOME', str(package))  # a file
    assert runtime.read() == expected()


def test_a_cache_that_is_full_keeps_no_part(package, npm, tmp_path, monkeypatch):
    npm(f'/bin/cp {package} {runtime.ARCHIVE}')

    def full(path, content):
        path.touch()
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(pathlib.Path, 'write_bytes', full)
    assert runtime.read() == expected()
    assert not any(runtime.kept_at().parent.iterdir())


@pytest.mark.parametrize(
    ('script', 'reason'),
    [
        (None, 'npm, which fetches it, is not installed: it comes with Node.js'),
        (
            'echo "npm error code ENOTFOUND\nnpm error network no way to it" >&2; exit 1',
            'npm cannot fetch it: network no way to it. On',
        ),
        ('exit 1', 'npm cannot fetch it: '),
        (f'echo another > {runtime.ARCHIVE}', 'what npm has fetched is another file: its SHA-512'),
    ],
)
def test_without_it_the_message_says_what_to_do(script, reason, npm):
    if script is not None:
        npm(script)
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        runtime.read()
    assert f'bring it here and add --runtime={runtime.ARCHIVE}' in str(error.value)
    assert not runtime.kept_at().exists()


def test_another_file_is_refused(package, tmp_path):
    with pytest.raises(UserError, match=r'missing.tgz cannot be read \(No such file .* `npm pack'):
        runtime.read(str(tmp_path / 'missing.tgz'))
    package.write_bytes(package.read_bytes() + b' ')
    with pytest.raises(UserError, match='given.tgz is not onnxruntime-web .* SHA-512 differs'):
        runtime.read(str(package))


def test_the_folder_says_whose_it_is():
    page = (ROOT / 'vit_jax/web/index.html').read_text()
    assert 'ONNX Runtime Web</a> (MIT licence, © Microsoft)' in page
