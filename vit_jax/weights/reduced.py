"""ONNX programs in float16 or int8, from programs in float32, by the tools of onnxruntime.

float16 halves the file: arrays and computation are in float16, inputs and outputs in float32. int8
quarters it: the kernels of dense layers are int8, with a scale for each output, and onnxruntime
quantises their inputs while it runs. The rest stays in float32.
"""

import copy
import os
import tempfile
from typing import Any

import numpy as np

from vit_jax.weights import export

DTYPES = ('float16', 'int8')


def reduced(program: Any, dtype: str) -> Any:
    """The ONNX program in another dtype.

    Args:
      program: an onnx.ModelProto from export.unrolled_onnx_program.
      dtype: one of DTYPES.

    Returns:
      An onnx.ModelProto with the same inputs and outputs.

    Raises:
      UserError: if onnxruntime is not installed.
    """
    program = copy.deepcopy(program)
    if dtype == 'float16':
        converter = export.import_package('onnxruntime.transformers.float16')
        return converter.convert_float_to_float16(program, keep_io_types=True)
    return _quantised(program)


def _quantised(program):
    onnx = export.import_package('onnx')
    quantization = export.import_package('onnxruntime.quantization')
    _replace_einsum(program.graph)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'int8.onnx')
        quantization.quantize_dynamic(
            program, path, op_types_to_quantize=['MatMul'], per_channel=True
        )
        return onnx.load(path)


def _replace_einsum(graph):
    """Writes dense layers as MatMul, the operator that onnxruntime quantises.

    jax2onnx writes them as Einsum with a constant kernel.
    """
    onnx = export.import_package('onnx')
    kernels = {array.name: array for array in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type == 'Einsum' and node.input[1] in kernels:
            kernel = onnx.numpy_helper.to_array(kernels[node.input[1]])
            new_nodes, arrays = _dense(node, kernel)
            nodes += new_nodes
            graph.initializer.extend(arrays)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    export.drop_unused(graph)


def _dense(node, kernel):
    """The nodes and arrays that compute an Einsum with a constant kernel by MatMul.

    The node itself if it is no dense layer, ...I,IO->...O for axes I of inputs and O of outputs.
    """
    onnx = export.import_package('onnx')
    equation = onnx.helper.get_node_attr_value(node, 'equation').decode()
    operands, output = equation.split('->')
    left, right = operands.split(',')
    inputs = ''.join(axis for axis in right if axis not in output)
    outputs = right[len(inputs) :]
    batch = left[: len(left) - len(inputs)]
    if (left, right, output) != (batch + inputs, inputs + outputs, batch + outputs):
        return [node], []
    result = node.output[0]
    input_shape = np.array([0] * len(batch) + [-1])  # 0 keeps the length of an axis
    output_shape = np.array([0] * len(batch) + list(kernel.shape[len(inputs) :]))
    arrays = {
        f'{result}_input_shape': input_shape,
        f'{result}_kernel': kernel.reshape(int(np.prod(kernel.shape[: len(inputs)])), -1),
        f'{result}_output_shape': output_shape,
    }
    nodes = [
        onnx.helper.make_node(
            'Reshape', [node.input[0], f'{result}_input_shape'], [f'{result}_rows']
        ),
        onnx.helper.make_node('MatMul', [f'{result}_rows', f'{result}_kernel'], [f'{result}_flat']),
        onnx.helper.make_node('Reshape', [f'{result}_flat', f'{result}_output_shape'], [result]),
    ]
    return nodes, [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
