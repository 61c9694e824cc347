"""Programs that need no vit_jax: StableHLO through jax.export, and ONNX.

Both take normalised images float32 [batch, height, width, channels] of any batch size and give
logits [batch, classes], computed in float32; the parameters are in the file.
"""

import importlib
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.files import named
from vit_jax.weights import array_files, preparation
from vit_jax.weights.model import Weights

FORMATS = ('stablehlo', 'onnx')
PLATFORMS = ('cpu', 'cuda', 'tpu')
LARGEST_FILE = 1.9e9  # bytes; of parameters in an ONNX file, which ends at 2 GiB


def save(weights: Weights, path: str, to: str) -> None:
    """Writes the model as one of FORMATS; read it with jax.export.deserialize or an ONNX runtime.

    An ONNX file has preparation.metadata, too. It cannot exceed 2 GiB: the parameters of larger
    models go into PATH.data.
    Raises UserError if jax2onnx is needed and not installed, or cannot convert the model.
    """
    if to == 'onnx':
        _save_onnx(weights, path)
        return
    with array_files.replacing(path) as temporary:
        (batch,) = jax.export.symbolic_shape('batch')
        images = jax.ShapeDtypeStruct((batch, *_image_shape(weights)), jnp.float32)
        exported = jax.export.export(jax.jit(function(weights)), platforms=PLATFORMS)(images)
        pathlib.Path(temporary).write_bytes(exported.serialize())


def _save_onnx(weights, path):
    jax2onnx, onnx = _import('jax2onnx'), _import('onnx')
    if weights.model['resnet']:
        raise UserError(
            'jax2onnx cannot convert the max-pooling of a ResNet for batches of any '
            'size: hybrids and ResNets go to stablehlo only.'
        )
    if any(x.dtype == np.float16 for x in jax.tree.leaves(weights.params)):
        raise UserError(
            'jax2onnx writes float16 arrays with the type of float32: add '
            '--dtype=float32 or --dtype=bfloat16.'
        )
    for name in ('jax2onnx', 'onnx_ir'):  # their warnings do not concern users
        logging.getLogger(name).setLevel(logging.ERROR)
    program = jax2onnx.to_onnx(
        function(weights),
        inputs=[('batch', *_image_shape(weights))],
        model_name='vit_jax',
        input_names=['images'],
        output_names=['logits'],
    )
    _drop_unused(program.graph)
    onnx.helper.set_model_props(program, preparation.metadata(weights))
    large = sum(x.nbytes for x in jax.tree.leaves(weights.params)) > LARGEST_FILE
    folder, name = os.path.split(path)
    # Both names are in the file.
    with named(path), tempfile.TemporaryDirectory(dir=folder or '.') as made:
        onnx.save_model(
            program, f'{made}/{name}', save_as_external_data=large, location=f'{name}.data'
        )
        if large:
            os.replace(f'{made}/{name}.data', f'{path}.data')
        elif os.path.exists(path):
            pathlib.Path(f'{path}.data').unlink(missing_ok=True)  # of the model that is replaced
        os.replace(f'{made}/{name}', path)


def _drop_unused(graph):
    """Removes constants that no node takes, of which onnxruntime warns; returns the names taken."""
    used = {output.name for output in graph.output}.union(*(node.input for node in graph.node))
    for node in graph.node:
        used = used.union(*(_drop_unused(x.g) for x in node.attribute if x.HasField('g')))
    for k in reversed(range(len(graph.initializer))):
        if graph.initializer[k].name not in used:
            del graph.initializer[k]
    return used


def _image_shape(weights):
    return (*weights.image_size(), weights.channels())


def function(weights: Weights) -> Callable[[jax.Array], jax.Array]:
    """Images to logits, without a trace of Flax.

    The model sees a single image and vmap adds the batch, whose size is unknown. jax2onnx would
    replace Flax's layers by operations of its own, which have no vmap.
    """
    model = models.build(weights.model, weights.num_classes, dtype='float32')
    params = jax.tree.map(jnp.asarray, weights.params)
    image = jax.ShapeDtypeStruct(_image_shape(weights), jnp.float32)
    program = jax.extend.core.jaxpr_as_fun(
        jax.make_jaxpr(lambda image: model.apply({'params': params}, image[None])[0])(image)
    )
    return jax.vmap(lambda image: program(image)[0])


def run(path: str, to: str, images: np.ndarray) -> tuple[np.ndarray, str]:
    """Logits that the file gives, and which program ran it; ONNX needs onnxruntime."""
    if to == 'onnx':
        runtime = _import('onnxruntime')
        options = runtime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = runtime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
        return session.run(['logits'], {'images': images})[0], f'onnxruntime {runtime.__version__}'
    exported = jax.export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
    return np.asarray(exported.call(images)), f'jax.export of jax {jax.__version__}'


def _import(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f'ONNX needs more ({error}): pip install -e ".[onnx]"') from error
