"""The Hugging Face hub, without a network: what its cache has is found, the rest is explained."""

import shutil
import time

import numpy as np
import pytest
from huggingface_hub import constants

from tests.weights import small
from vit_jax import weights
from vit_jax.errors import UserError


@pytest.fixture(params=['offline', 'unreachable'])
def cache(request, tmp_path, monkeypatch):
    """An empty cache of the hub; HF_HUB_OFFLINE is set, or nobody answers."""
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
    given, _ = weights.approximate(small.make('vit'), str(path), layout)
    weights.save(given, str(path), layout)
    return given


@pytest.mark.parametrize(('source', 'repository', 'layout', 'name'), [
    ('hf:someone/flowers', 'someone/flowers', 'huggingface', ''),
    ('timm:vit_small.flowers', 'timm/vit_small.flowers', 'timm', ''),
    ('hf:someone/flowers', 'someone/flowers', 'torchvision', 'pytorch_model.bin'),
    ('hf:someone/flowers/b16.npz', 'someone/flowers', 'google', 'b16.npz'),
])
def test_what_the_cache_has(source, repository, layout, name, cache):
    given = downloaded(cache, repository, layout, name)
    found = weights.load(source)
    assert (found.model, found.layout, found.source) == (given.model, layout, source)
    np.testing.assert_array_equal(found.params['cls'], given.params['cls'])


def test_without_network_and_cache(cache):
    start = time.monotonic()
    with pytest.raises(UserError, match='hf:someone/flowers: the Hugging Face hub cannot be '
                       "reached and its cache on this machine lacks 'someone/flowers'"):
        weights.load('hf:someone/flowers')
    assert time.monotonic() - start < 20
    downloaded(cache, 'someone/flowers', 'google', 'b16.npz')
    with pytest.raises(UserError, match="no file .*other.npz"):
        weights.load('hf:someone/flowers/other.npz')
    shutil.rmtree(cache)


@pytest.mark.parametrize('source', ['hf:flowers', 'hf:', 'timm:', 'hf:/x'])
def test_names(source):
    with pytest.raises(UserError, match='expected hf:ORGANISATION/NAME'):
        weights.load(source)


def test_impossible_name():
    with pytest.raises(UserError, match="the Hugging Face hub has no public model 'a b/c'"):
        weights.load('hf:a b/c')
