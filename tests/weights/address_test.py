"""Weights at a web address, served by this machine, and errors of downloads."""

import http.server
import os
import pathlib
import threading
import urllib.parse

import numpy as np
import pytest

from tests.support import small
from tests.support.errors import refused
from vit_jax import weights
from vit_jax.weights import address


class Files(http.server.BaseHTTPRequestHandler):
    """Serves a folder; a file named short.npz ends early."""

    folder, asked_for = None, []

    def do_GET(self):
        self.asked_for.append(self.path)
        path = self.folder / os.path.basename(urllib.parse.unquote(self.path))
        if not path.exists():
            return self.send_error(404)
        content = path.read_bytes()
        self.send_response(200)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        return self.wfile.write(content[:100] if path.name == 'short.npz' else content)

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(address, folder) of a server in place of Google's buckets; the cache is empty."""
    (tmp_path / 'served').mkdir()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(Files, 'folder', tmp_path / 'served')
    monkeypatch.setattr(Files, 'asked_for', [])
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(address, 'BUCKETS', f'http://127.0.0.1:{server.server_port}/')
        yield address.BUCKETS, tmp_path / 'served'
        server.shutdown()


def test_weights_are_downloaded_once_per_address(served):
    url, folder = served
    given = small.make('vit')
    weights.save(given, str(folder / 'B+x.npz'), 'google')
    for source in ('gs://models/old/B+x.npz', f'{url}other/B%2Bx.npz', 'gs://models/old/B+x.npz'):
        found = weights.load(source)
        assert found.source == source
        np.testing.assert_array_equal(found.params['cls'], given.params['cls'])
    os.remove(folder / 'B+x.npz')
    assert weights.load('gs://models/old/B+x.npz').layout == 'google'
    assert Files.asked_for == ['/models/old/B%2Bx.npz', '/other/B%2Bx.npz']


@pytest.mark.parametrize(
    ('source', 'kind', 'reason'),
    [
        ('gs://models/gone.npz', 'unreadable', 'HTTP Error 404'),
        ('gs://models/short.npz', 'unreadable', 'only 100 of 5000 bytes arrived'),
        ('http://127.0.0.1:9/x.npz', 'unreadable', 'refused'),
        ('http://127.0.0.1:9/\xe4.npz', 'unreadable', ''),
        ('http://[::1/x.npz', 'unreadable', ''),
        ('http://127.0.0.1:9/%2Ftmp%2Fx.npz', 'unreadable', '/cache/vit_jax/weights/'),
        ('http://127.0.0.1:9/a%00.npz', 'value', 'the address of a file that ends in .safetensors'),
        ('https://127.0.0.1/x/%2e%2e%2f..%2f', 'value', ''),
        ('gs://models/folder', 'value', ''),
    ],
)
def test_failed_downloads_are_errors_and_not_cached(source, kind, reason, served, tmp_path):
    (served[1] / 'short.npz').write_bytes(bytes(5000))
    with refused(kind, file=source) as error:
        weights.load(source)
    assert reason in str(error.value)
    assert not [x for x in pathlib.Path(tmp_path / 'cache').rglob('*') if x.is_file()]
