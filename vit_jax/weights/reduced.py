"""ONNX programs in float16 or int8, from programs in float32, by the tools of onnxruntime.

float16 halves the file: arrays and computation are in float16, inputs and outputs in float32. int8
quarters it: the kernels of dense layers are int8, with a scale for each output. onnxruntime also
quantises the inputs of these layers while it runs, except where this loses accuracy: layers with
fewer outputs than inputs compute in float32. These are the head and the second layer of an MLP,
whose inputs have outliers. The rest stays in float32.
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
    narrowing = _narrowing_layers(program.graph)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'int8.onnx')
        quantization.quantize_dynamic(
            program,
            path,
            op_types_to_quantize=['MatMul'],
            per_channel=True,
            nodes_to_exclude=list(narrowing),
        )
        quantised = onnx.load(path)
    _store_as_int8(quantised.graph, set(narrowing.values()))
    return quantised


def _narrowing_layers(graph):
    """The kernels, by the names of their nodes, of layers with fewer outputs than inputs."""
    shapes = {array.name: array.dims for array in graph.initializer}
    kernels = {}
    for node in graph.node:
        if node.op_type != 'MatMul' or node.input[1] not in shapes:
            continue
        inputs, outputs = shapes[node.input[1]]
        if outputs < inputs:
            kernels[node.name] = node.input[1]
    return kernels


def _store_as_int8(graph, kernels):
    """Replaces kernels [inputs, outputs] by int8 and a scale for each output."""
    onnx = export.import_package('onnx')
    arrays = []
    nodes = []
    for array in graph.initializer:
        if array.name not in kernels:
            arrays.append(array)
            continue
        kernel = onnx.numpy_helper.to_array(array)
        scales = np.maximum(np.abs(kernel).max(0) / 127, np.finfo(np.float32).tiny)
        levels = np.round(kernel / scales).astype(np.int8)
        names = [f'{array.name}_levels', f'{array.name}_scales']
        arrays.append(onnx.numpy_helper.from_array(levels, names[0]))
        arrays.append(onnx.numpy_helper.from_array(scales, names[1]))
        nodes.append(onnx.helper.make_node('DequantizeLinear', names, [array.name], axis=1))
    nodes += graph.node
    del graph.initializer[:]
    graph.initializer.extend(arrays)
    del graph.node[:]
    graph.node.extend(nodes)


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
        onnx.helper.make_node(
            'MatMul', [f'{result}_rows', f'{result}_kernel'], [f'{result}_flat'], name=result
        ),
        onnx.helper.make_node('Reshape', [f'{result}_flat', f'{result}_output_shape'], [result]),
    ]
    return nodes, [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
