"""Sources of onnxruntime-web: a file, the cache, npm; each with a checksum."""

import base64
import hashlib
import io
import os
import pathlib
import tarfile

import pytest

from tests.support.errors import refused
from tests.support.runs import ROOT
from vit_jax.web import runtime


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with the expected checksum, on a machine without npm and with an empty cache."""
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
    """Installs a fake npm: (its action in Bourne shell) -> the file of its arguments."""

    def install(script):
        path = tmp_path / 'bin/npm'
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
        path.chmod(0o755)
        return tmp_path / 'calls'

    return install


def expected():
    return {name: member.encode() for name, member in runtime.FILES.items()}


def test_a_file_is_read(package):
    assert runtime.read(str(package)) == expected()


def test_npm_downloads_it_once(package, npm):
    calls = npm(f'/bin/cp {package} {runtime.ARCHIVE}')
    before = sorted(os.listdir())
    for _ in range(2):
        assert runtime.read() == expected()
    assert calls.read_text().startswith(f'pack onnxruntime-web@{runtime.VERSION} --ignore-scripts')
    assert len(calls.read_text().splitlines()) == 1
    assert [path.name for path in runtime.kept_at().parent.iterdir()] == [runtime.ARCHIVE]
    assert sorted(os.listdir()) == before
    runtime.kept_at().write_bytes(b'damaged')  # then npm downloads it again
    assert runtime.read() == expected()
    assert len(calls.read_text().splitlines()) == 2


def test_a_cache_that_cannot_be_written_is_no_error(package, npm, tmp_path, monkeypatch):
    npm(f'/bin/cp {package} {runtime.ARCHIVE}')
    monkeypatch.setenv('XDG_CACHE_HOME', str(package))  # a file
    assert runtime.read() == expected()


def test_a_full_cache_keeps_no_part(package, npm, tmp_path, monkeypatch):
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
        (None, 'npm, which downloads it, is not installed: it comes with Node.js'),
        (
            'echo "npm error code ENOTFOUND\nnpm error network no way to it" >&2; exit 1',
            'npm cannot download it: network no way to it. On',
        ),
        ('exit 1', 'npm cannot download it: '),
        (f'echo another > {runtime.ARCHIVE}', 'npm downloaded another file: its SHA-512'),
    ],
)
def test_a_failed_download_is_an_error_with_a_remedy(script, reason, npm):
    if script is not None:
        npm(script)
    with refused('missing', field='--runtime', file=runtime.kept_at()) as error:
        runtime.read()
    assert reason in str(error.value)
    assert f'copy it here and add --runtime={runtime.ARCHIVE}' in str(error.value)
    assert not runtime.kept_at().exists()


def test_another_file_is_refused(package, tmp_path):
    with refused('unreadable', field='--runtime', file=tmp_path / 'missing.tgz'):
        runtime.read(str(tmp_path / 'missing.tgz'))
    package.write_bytes(package.read_bytes() + b' ')
    with refused('content', field='--runtime', file=package):
        runtime.read(str(package))


def test_the_page_names_the_runtime_and_its_licence():
    page = (ROOT / 'vit_jax/web/index.html').read_text()
    assert 'ONNX Runtime Web</a> (MIT licence, © Microsoft)' in page
