"""Programs that run without vit_jax: StableHLO and ONNX."""

import dataclasses
import os
import sys

import jax
import numpy as np
import pytest

from tests.support import interop, small
from tests.support.errors import refused
from vit_jax.weights import export


def assert_runs(given, path, to):
    """The file gives our logits for batches of any size."""
    for number in (1, 3):
        images = small.images(given, number)
        found, _ = export.run(path, to, images)
        expected = small.logits(given, images)
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    'model',
    ['vit', *(pytest.param(model, marks=pytest.mark.nightly) for model in ('hybrid', 'bit'))],
)
def test_stablehlo_gives_our_logits(model, tmp_path):
    path = str(tmp_path / 'x')
    export.save(small.make(model), path, 'stablehlo')
    assert_runs(small.make(model), path, 'stablehlo')
    with open(path, 'rb') as file:
        exported = jax.export.deserialize(bytearray(file.read()))
    assert exported.platforms == ('cpu', 'cuda', 'tpu')
    assert 'stablehlo.dot_general' in exported.mlir_module()


@pytest.mark.parametrize(
    ('model', 'large'),
    [
        ('vit', False),
        pytest.param('map', True, marks=pytest.mark.slow),
        pytest.param('axial', False, marks=pytest.mark.slow),
    ],
)
def test_onnx_gives_our_logits(model, large, tmp_path, monkeypatch, capfd):
    interop.require('jax2onnx')
    runtime = interop.require('onnxruntime')
    path = str(tmp_path / 'x.onnx')
    if large:
        monkeypatch.setattr(export, 'LARGEST_FILE', 0)
    for _ in range(2 if large else 1):
        export.save(small.make(model), path, 'onnx')
    assert_runs(small.make(model), path, 'onnx')
    runtime.InferenceSession(path, providers=['CPUExecutionProvider'])
    assert 'onnxruntime' not in capfd.readouterr().err  # it warns of unused constants
    assert sorted(os.listdir(tmp_path)) == ['x.onnx', *(['x.onnx.data'] if large else [])]


def test_a_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    onnx = interop.require('onnx')
    interop.require('jax2onnx')
    for name in ('x.onnx', 'x.onnx.data'):
        (tmp_path / name).write_text('old')
    save = onnx.save_model

    def full(program, path, **options):
        save(program, path, **options)
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(onnx, 'save_model', full)
    monkeypatch.setattr(export, 'LARGEST_FILE', 0)
    with refused('unwritable', file=tmp_path / 'x.onnx'):
        export.save(small.make('vit'), str(tmp_path / 'x.onnx'), 'onnx')
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ('x.onnx', 'x.onnx.data'), 'old'
    )


def test_models_that_jax2onnx_cannot_convert_are_refused(tmp_path, monkeypatch):
    interop.require('jax2onnx')
    with refused('inapplicable', field='--to', value='onnx'):
        export.save(small.make('hybrid'), str(tmp_path / 'x.onnx'), 'onnx')
    vit = small.make('vit')
    half = dataclasses.replace(vit, params=jax.tree.map(np.float16, vit.params))
    with refused('inapplicable', field='--dtype', value='float16'):
        export.save(half, str(tmp_path / 'x.onnx'), 'onnx')
    monkeypatch.setitem(sys.modules, 'jax2onnx', None)
    with refused('missing', value='jax2onnx'):
        export.save(small.make('vit'), str(tmp_path / 'x.onnx'), 'onnx')
    assert not any(tmp_path.iterdir())
