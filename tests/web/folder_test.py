"""The files of the folder, and models that are refused."""

import dataclasses
import json
import os
import pathlib
import re

import pytest

from tests.support import interop, small
from tests.support.errors import refused
from tests.support.pages import Read
from tests.support.runs import ROOT, check_message, run_here
from vit_jax import convert, web, weights
from vit_jax.web import folder, runtime
from vit_jax.weights import export


@pytest.fixture
def some_runtime(monkeypatch):
    """A runtime of two short files, which needs no download."""
    monkeypatch.setattr(runtime, 'read', lambda archive: {name: b'//' for name in runtime.FILES})


@pytest.mark.slow
def test_command_writes_the_folder(some_runtime, tmp_path):
    interop.require('jax2onnx')
    weights.save(small.make('vit'), str(tmp_path / 'x.safetensors'), 'vit_jax')
    arguments = tmp_path / 'x.safetensors', f'{tmp_path}/page/', '--to=web'
    result = run_here(*arguments, '--verify', command=convert)
    assert result.returncode == 0, result.stderr
    assert f'python -m http.server --directory {tmp_path}/page/, then' in result.stderr
    assert 'page/model.onnx by onnxruntime ' in result.stderr
    assert sorted(os.listdir(tmp_path / 'page')) == sorted(web.FILES)
    record = json.loads((tmp_path / 'page/model.json').read_text())
    assert record == {
        'name': 'x.safetensors',
        'image_size': [16, 16],
        'target_size': [20, 20],
        'fit': 'squash',
        'resize': 'bicubic',
        'antialias': True,
        'uint8_resize': True,
        'mean': [0.4, 0.5, 0.6],
        'std': [0.3, 0.2, 0.1],
        'classes': small.CLASSES,
        'loss': 'softmax',
        'bytes': os.path.getsize(tmp_path / 'page/model.onnx'),
    }
    check_message(run_here(*arguments, command=convert), 'page/ exists already: name another')
    assert sorted(os.listdir(tmp_path)) == ['page', 'x.safetensors']


def test_overwriting_spares_other_files(some_runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(export, 'save', lambda given, path, to: pathlib.Path(path).touch())
    path = tmp_path / 'page'
    for _ in range(2):
        web.save(small.make('vit'), str(path))
    assert sorted(os.listdir(path)) == sorted(web.FILES)
    (path / 'thesis.tex').touch()
    with refused('conflict', file=path) as error:
        web.save(small.make('vit'), str(path))
    assert '(thesis.tex)' in str(error.value)
    assert os.listdir(tmp_path) == ['page']


@pytest.mark.parametrize(
    ('model', 'expected'),
    [
        ('headless', dict(field='num_classes', file='headless')),
        ('rectangle', dict(file='rectangle', value=5)),
        ('hybrid', dict(field='--to', value='onnx')),
    ],
)
def test_models_that_a_page_cannot_use_are_refused(model, expected, some_runtime, tmp_path):
    interop.require('jax2onnx')
    with refused('inapplicable', **expected):
        web.save(small.make(model), str(tmp_path / 'page'))
    assert not os.listdir(tmp_path)


def test_models_that_are_too_large_for_a_browser_are_refused(some_runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(export, 'LARGEST_FILE', 5e5)
    with refused('inapplicable', file='vit') as error:
        web.save(small.make('vit'), str(tmp_path / 'page'))
    assert str(error.value) == (
        'vit has parameters of 0.0 GB, and a browser reads models up to 0.0 GB: add '
        '--dtype=bfloat16, or choose a smaller model.'
    )
    assert not os.listdir(tmp_path)


def test_missing_preprocessing_and_names_get_defaults():
    given = dataclasses.replace(small.make('vit'), preprocess=None, classes=None, loss='sigmoid')
    found = folder.about(given)
    assert found['classes'] == [f'class {k}' for k in range(7)]
    assert (found['fit'], found['mean'], found['loss']) == ('cover', (0.5, 0.5, 0.5), 'sigmoid')


def test_a_checkpoint_has_the_name_of_its_run(tmp_path):
    path = tmp_path / 'flowers/checkpoints/1200'
    path.mkdir(parents=True)
    given = dataclasses.replace(small.make('vit'), source=str(path))
    assert folder.about(given)['name'] == 'flowers, step 1,200'


def test_the_page_requests_only_its_own_files():
    """Addresses in it are names in its folder, and it has nothing that its policy forbids."""
    read = Read((ROOT / 'vit_jax/web/index.html').read_text())
    names = [found[name] for _, found in read.elements for name in ('src', 'href') if name in found]
    assert {name for name in names if name != 'data:,'} <= set(web.FILES)
    assert not [
        name
        for _, found in read.elements
        for name in found
        if name.startswith('on') or name == 'style'
    ]
    assert [script.strip() for script in read.scripts] == ['']
    script = (ROOT / 'vit_jax/web/page.js').read_text()
    assert not re.search(r'https?:|innerHTML|insertAdjacentHTML|document\.write|eval\(', script)
    policy = read.of('meta', **{'http-equiv': 'Content-Security-Policy'})[0]['content']
    assert policy.startswith(
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'; "
    )
    assert max(map(len, script.splitlines())) <= 100
