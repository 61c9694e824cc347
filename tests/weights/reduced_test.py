"""ONNX programs in float16 and int8."""

import numpy as np
import pytest

from tests.support import interop, small
from tests.support.errors import refused
from vit_jax.weights import export, reduced

# Two dense layers, one with two axes of inputs, and a product of two computed arrays.
PROGRAM = """
<ir_version: 10, opset_import: ["": 23]>
model (float[batch, 4, 6] images) => (float[batch, 4, 5] logits)
{
  heads = Einsum <equation = "abc,cde->abde"> (images, kernel)
  products = Einsum <equation = "abde,afde->abfde"> (heads, heads)
  summed = Einsum <equation = "abfde,fg->abgde"> (products, mixing)
  axis = Constant <value_ints = [2]> ()
  means = ReduceMean <keepdims = 0> (summed, axis)
  logits = Einsum <equation = "abde,deg->abg"> (means, head)
}
"""
SHAPES = {'kernel': (6, 2, 3), 'mixing': (4, 4), 'head': (2, 3, 5)}


def make_program():
    """The program with random arrays."""
    onnx = interop.require('onnx')
    program = onnx.parser.parse_model(PROGRAM)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        array = rng.normal(size=shape).astype(np.float32)
        program.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return program


def outputs(program):
    """The logits of a program of PROGRAM's inputs."""
    runtime = interop.require('onnxruntime')
    images = np.random.default_rng(1).normal(size=(3, 4, 6)).astype(np.float32)
    session = runtime.InferenceSession(
        program.SerializeToString(), providers=['CPUExecutionProvider']
    )
    return session.run(['logits'], {'images': images})[0]


def types(program):
    """How many arrays of more than one axis the program has of each dtype."""
    onnx = interop.require('onnx')
    counts = {}
    for array in program.graph.initializer:
        if len(array.dims) > 1:
            name = onnx.TensorProto.DataType.Name(array.data_type)
            counts[name] = counts.get(name, 0) + 1
    return counts


def test_dense_layers_become_int8_and_other_products_stay():
    expected = outputs(make_program())
    program = reduced.reduced(make_program(), 'int8')
    assert types(program) == {'INT8': 2, 'FLOAT': 1}  # `mixing` is no dense layer
    operators = [node.op_type for node in program.graph.node]
    assert operators.count('Einsum') == 2
    # The head has fewer outputs than inputs: only its kernel is int8.
    assert operators.count('MatMulInteger') == operators.count('DequantizeLinear') == 1
    difference = np.abs(outputs(program) - expected).max()
    assert 0 < difference < 0.05 * np.abs(expected).max()


def test_float16_keeps_the_types_of_inputs_and_outputs():
    expected = outputs(make_program())
    program = reduced.reduced(make_program(), 'float16')
    assert types(program) == {'FLOAT16': 3}
    actual = outputs(program)
    assert actual.dtype == np.float32
    difference = np.abs(actual - expected).max()
    assert 0 < difference < 0.01 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize('model', ['vit', 'map'])
def test_models_give_nearly_their_logits_in_fewer_bytes(model, tmp_path):
    interop.require('jax2onnx')
    given = small.make(model)
    batch = small.images(given, 3)
    expected = small.logits(given, batch)
    sizes = {}
    for dtype, limit in (('float32', 1e-5), ('float16', 0.01), ('int8', 0.15)):
        program = export.unrolled_onnx_program(given)
        if dtype in reduced.DTYPES:
            program = reduced.reduced(program, dtype)
        path = tmp_path / f'{dtype}.onnx'
        export.write_onnx(program, given, str(path))
        actual, _ = export.run(str(path), 'onnx', batch)
        assert np.abs(actual - expected).max() < limit * np.abs(expected).max(), dtype
        sizes[dtype] = path.stat().st_size
    assert sizes['float16'] < 0.65 * sizes['float32']
    assert sizes['int8'] < 0.45 * sizes['float32']


def test_a_model_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(export, 'LARGEST_FILE', 1000)
    with refused('inapplicable', field='--dtype', file='vit'):
        export.unrolled_onnx_program(small.make('vit'))
