"""Accuracy of ONNX files on a split."""

import pathlib

import pytest

from tests.support import interop, small
from tests.support.datasets import write_images
from vit_jax.scoring import exported

CLASSES = ['ant', 'bee', 'cat']
# Logits that do not depend on the image: class 0, or class 2, is the most probable.
ALWAYS = """
<ir_version: 10, opset_import: ["": 23]>
model (float[batch, 16, 16, 3] images) => (float[batch, 3] logits)
<int64[3] axes = {{1, 2, 3}}, float[1, 3] bias = {{{bias}}}, float zero = {{0}}>
{{
  means = ReduceMean <keepdims = 0> (images, axes)
  last = Constant <value_ints = [1]> ()
  column = Unsqueeze (means, last)
  nothing = Mul (column, zero)
  logits = Add (nothing, bias)
}}
"""


@pytest.fixture
def files(tmp_path):
    """Two ONNX files: one always says ant, the other always cat."""
    onnx = interop.require('onnx')
    interop.require('onnxruntime')
    paths = []
    for name, bias in (('ant', '2, 1, 0'), ('cat', '0, 1, 2')):
        paths.append(str(tmp_path / f'{name}.onnx'))
        onnx.save(onnx.parser.parse_model(ALWAYS.format(bias=bias)), paths[-1])
    return paths


def dataset(path):
    return {
        'name': str(path),
        'eval_split': 'val',
        'data_dir': '',
        'label': '',
        'subset': '',
        'stratify': True,
        'heic': True,
        'multi_label': False,
        'files_at_once': 4,
    }


def test_accuracy_counts_every_readable_image_once(files, tmp_path, caplog):
    weights = small.with_classes(small.make('vit'), CLASSES)
    write_images(tmp_path / 'data/val', CLASSES[:1], 5)
    write_images(tmp_path / 'data/val', CLASSES[1:], 1)
    broken = next(pathlib.Path(tmp_path, 'data/val/bee').iterdir())
    broken.write_bytes(broken.read_bytes()[:20])
    accuracies, num_images = exported.accuracies(files, weights, dataset(tmp_path / 'data'))
    assert num_images == 6
    assert accuracies == [5 / 6, 1 / 6]
    assert 'Left out 1 broken image' in caplog.text
