"""The Hugging Face hub without a network: its cache is used, everything else is an error."""

import fnmatch
import hashlib
import http.server
import json
import os
import shutil
import threading
import time

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from tests.support import interop, small
from tests.support.errors import refused
from vit_jax import weights
from vit_jax.weights import hub


@pytest.fixture(params=['offline', 'unreachable'])
def cache(request, tmp_path, monkeypatch):
    """An empty cache of the hub; HF_HUB_OFFLINE is set, or the hub does not answer."""
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    if request.param == 'offline':
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    else:
        monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
    return tmp_path / 'hub'


def downloaded(cache, repository, layout, name):
    """Puts weights where the hub's own download puts them."""
    commit = 'a' * 40
    folder = cache / f'models--{repository.replace("/", "--")}'
    (folder / 'refs').mkdir(parents=True)
    (folder / 'refs/main').write_text(commit)
    (folder / 'snapshots' / commit).mkdir(parents=True)
    path = folder / 'snapshots' / commit / name if name else folder / 'snapshots' / commit
    if name.endswith('.bin'):
        interop.require('torch')
    given, _ = weights.approximate(small.make('vit'), str(path), layout)
    weights.save(given, str(path), layout)
    return given


@pytest.mark.parametrize(
    ('source', 'repository', 'layout', 'name'),
    [
        ('hf:someone/flowers', 'someone/flowers', 'huggingface', ''),
        ('timm:vit_small.flowers', 'timm/vit_small.flowers', 'timm', ''),
        ('hf:someone/flowers', 'someone/flowers', 'torchvision', 'pytorch_model.bin'),
        ('hf:someone/flowers/b16.npz', 'someone/flowers', 'google', 'b16.npz'),
    ],
)
def test_weights_in_the_cache_are_loaded(source, repository, layout, name, cache):
    given = downloaded(cache, repository, layout, name)
    found = weights.load(source)
    assert (found.model, found.layout, found.source) == (given.model, layout, source)
    np.testing.assert_array_equal(found.params['cls'], given.params['cls'])


def test_without_network_and_cache_the_error_names_the_model(cache):
    start = time.monotonic()
    with refused('unreadable', file='hf:someone/flowers', value='someone/flowers') as error:
        weights.load('hf:someone/flowers')
    assert str(error.value).startswith(
        'hf:someone/flowers: the Hugging Face hub cannot be reached and its cache on this machine '
        "lacks 'someone/flowers' ("
    )
    assert time.monotonic() - start < 20
    downloaded(cache, 'someone/flowers', 'google', 'b16.npz')
    with refused('missing'):
        weights.load('hf:someone/flowers/other.npz')
    shutil.rmtree(cache)


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's interface that a download needs, for one repository in a folder."""

    folder = None
    asked_for = []
    lost = None  # the download of this file ends before its first byte

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.partition('?')[0].strip('/').split('/')
        files = {p.name: p.read_bytes() for p in self.folder.iterdir()}
        if parts[:2] == ['api', 'models']:
            body = {
                'id': 'someone/flowers',
                'sha': 'b' * 40,
                'siblings': [{'rfilename': name} for name in files],
            }
            if 'tree' in parts:
                body = [
                    {'type': 'file', 'path': name, 'size': len(x), 'oid': 'c' * 40}
                    for name, x in files.items()
                ]
            found = parts[2:4] == ['someone', 'flowers']
            return self.answer(200 if found else 404, json.dumps(body).encode())
        if self.command == 'GET':
            self.asked_for.append(parts[-1])
        return self.answer(200 if parts[-1] in files else 404, files.get(parts[-1], b''))

    def answer(self, status, body):
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        self.send_header('ETag', f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header('X-Repo-Commit', 'b' * 40)
        if status == 404:
            self.send_header('X-Error-Code', 'RepoNotFound')
        self.end_headers()
        if self.command == 'GET' and not self.path.endswith(f'/{self.lost}'):
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub on this machine that serves the folder it returns as someone/flowers."""
    (tmp_path / 'served').mkdir()
    monkeypatch.setattr(Hub, 'folder', tmp_path / 'served')
    monkeypatch.setattr(Hub, 'asked_for', [])
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f'http://127.0.0.1:{server.server_port}'
        monkeypatch.setattr(constants, 'ENDPOINT', endpoint)
        monkeypatch.setattr(
            constants,
            'HUGGINGFACE_CO_URL_TEMPLATE',
            endpoint + '/{repo_id}/resolve/{revision}/{filename}',
        )
        yield tmp_path / 'served'
        server.shutdown()


@pytest.mark.parametrize(
    ('layout', 'name', 'others'),
    [
        ('huggingface', '', ['pytorch_model.bin', 'tf_model.h5', 'README.md']),
        ('torchvision', 'pytorch_model.bin', ['tf_model.h5']),
        ('google', 'b16.npz', ['README.md']),
    ],
)
def test_downloads_the_weights_and_nothing_else(layout, name, others, served, monkeypatch):
    path = served / name if name else served
    if name.endswith('.bin'):
        interop.require('torch')
    given, _ = weights.approximate(small.make('vit'), str(path), layout)
    weights.save(given, str(path), layout)
    needed = sorted(os.listdir(served))
    for other in others:
        (served / other).write_text('not to be downloaded')
    found = weights.load('hf:someone/flowers')
    assert (found.layout, found.model) == (layout, given.model)
    np.testing.assert_array_equal(found.params['cls'], given.params['cls'])
    assert sorted(Hub.asked_for) == needed
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    assert weights.load('hf:someone/flowers').model == given.model


def test_repositories_without_weights_and_missing_repositories_are_errors(served):
    (served / 'README.md').write_text('hello')
    with refused('content', file='hf:someone/flowers'):
        weights.load('hf:someone/flowers')
    with refused('unknown', file='hf:someone/else', value='someone/else'):
        weights.load('hf:someone/else')


def test_a_lost_connection_is_an_error(served, monkeypatch):
    (served / 'model.safetensors').write_bytes(bytes(1000))
    monkeypatch.setattr(Hub, 'lost', 'model.safetensors')
    monkeypatch.setattr(time, 'sleep', lambda _: None)  # it waits before it tries again
    with refused('unreadable', value='someone/flowers'):
        weights.load('hf:someone/flowers')
    assert Hub.asked_for.count('model.safetensors') > 1


@pytest.mark.parametrize(
    ('source', 'repository'),
    [
        ('hf:google/vit', 'google/vit'),
        ('hf:google/vit/sub/x.npz', 'google/vit'),
        ('timm:vit_b.augreg', 'timm/vit_b.augreg'),
        ('runs/photos', ''),
        ('gs://vit_models/x.npz', ''),
    ],
)
def test_the_repository_of_a_source_is_known(source, repository):
    assert hub.repository(source) == repository


@pytest.mark.parametrize('source', ['hf:flowers', 'hf:', 'timm:', 'hf:/x'])
def test_incomplete_names_are_refused(source):
    with refused('value', value=source):
        weights.load(source)


def test_impossible_names_are_refused():
    with refused('unknown', value='a b/c'):
        weights.load('hf:a b/c')


def test_a_model_in_a_folder_of_a_repository_is_loaded(tmp_path, monkeypatch):
    """A file can be named in its folder; other folders do not matter."""
    repository = tmp_path / 'repository'
    for folder, layout, name in (
        ('sub', 'huggingface', ''),
        ('unet', 'vit_jax', 'x.safetensors'),
        ('', 'google', 'b16.npz'),
    ):
        os.makedirs(repository / folder, exist_ok=True)
        given, _ = weights.approximate(small.make('vit'), str(repository / folder / name), layout)
        weights.save(given, str(repository / folder / name), layout)

    def download(name, allow_patterns):
        copied = tmp_path / str(len(os.listdir(tmp_path)))
        copied.mkdir()
        for path in repository.rglob('*.*'):
            relative = str(path.relative_to(repository))
            if any(fnmatch.fnmatch(relative, pattern) for pattern in allow_patterns):
                (copied / relative).parent.mkdir(exist_ok=True)
                shutil.copy(path, copied / relative)
        return str(copied)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    assert weights.load('hf:someone/flowers').layout == 'google'
    assert weights.load('hf:someone/flowers/sub/model.safetensors').layout == 'huggingface'
