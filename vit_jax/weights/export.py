"""Programs that run without vit_jax: StableHLO through jax.export, and ONNX.

Both map normalised images, float32 [batch, height, width, channels] of any batch size, to logits,
float32 [batch, classes]. They compute in float32 and include the parameters.
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
LARGEST_FILE = 1.9e9  # bytes of parameters in an ONNX file, whose limit is 2 GiB


def save(weights: Weights, path: str, to: str) -> None:
    """Writes the model as one of FORMATS; read it with jax.export.deserialize or an ONNX runtime.

    An ONNX file also has preparation.metadata. It cannot exceed 2 GiB: the parameters of larger
    models are written to PATH.data. Raises UserError if jax2onnx is needed and not installed, or if
    it cannot convert the model.
    """
    if to == 'onnx':
        _save_onnx(weights, path)
    else:
        _save_stablehlo(weights, path)


def _save_stablehlo(weights, path):
    with array_files.replacing(path) as temporary:
        (batch,) = jax.export.symbolic_shape('batch')
        images = jax.ShapeDtypeStruct((batch, *_image_shape(weights)), jnp.float32)
        exported = jax.export.export(jax.jit(function(weights)), platforms=PLATFORMS)(images)
        pathlib.Path(temporary).write_bytes(exported.serialize())


def _save_onnx(weights, path):
    jax2onnx = _import('jax2onnx')
    onnx = _import('onnx')
    _check_onnx(weights)
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
    is_large = sum(x.nbytes for x in jax.tree.leaves(weights.params)) > LARGEST_FILE
    folder, name = os.path.split(path)
    # A temporary folder, because the file contains the name of PATH.data.
    with named(path), tempfile.TemporaryDirectory(dir=folder or '.') as new:
        onnx.save_model(
            program, f'{new}/{name}', save_as_external_data=is_large, location=f'{name}.data'
        )
        if is_large:
            os.replace(f'{new}/{name}.data', f'{path}.data')
        elif os.path.exists(path):  # the model that is replaced may have had a second file
            pathlib.Path(f'{path}.data').unlink(missing_ok=True)
        os.replace(f'{new}/{name}', path)


def _check_onnx(weights):
    """Raises UserError for a model that jax2onnx cannot convert."""
    if weights.model['resnet']:
        raise UserError(
            'jax2onnx cannot convert the max-pooling of a ResNet for batches of any '
            'size: hybrids and ResNets go to stablehlo only.',
            kind='inapplicable',
            field='--to',
            value='onnx',
        )
    if any(x.dtype == np.float16 for x in jax.tree.leaves(weights.params)):
        raise UserError(
            'jax2onnx writes float16 arrays with the type of float32: add '
            '--dtype=float32 or --dtype=bfloat16.',
            kind='inapplicable',
            field='--dtype',
            value='float16',
        )


def _drop_unused(graph):
    """Removes constants that no node uses, because onnxruntime warns of them.

    Returns the names that the graph uses.
    """
    used = {output.name for output in graph.output}
    for node in graph.node:
        used.update(node.input)
        for attribute in node.attribute:
            if attribute.HasField('g'):
                used |= _drop_unused(attribute.g)
    for k in reversed(range(len(graph.initializer))):
        if graph.initializer[k].name not in used:
            del graph.initializer[k]
    return used


def _image_shape(weights):
    return (*weights.image_size(), weights.channels())


def function(weights: Weights) -> Callable[[jax.Array], jax.Array]:
    """A function from images to logits without Flax layers in its trace.

    The model is traced for a single image, and vmap adds a batch of unknown size. jax2onnx would
    replace Flax's layers by its own operations, which do not support vmap.
    """
    model = models.build(weights.model, weights.num_classes, dtype='float32')
    params = jax.tree.map(jnp.asarray, weights.params)
    image = jax.ShapeDtypeStruct(_image_shape(weights), jnp.float32)
    program = jax.extend.core.jaxpr_as_fun(
        jax.make_jaxpr(lambda image: model.apply({'params': params}, image[None])[0])(image)
    )
    return jax.vmap(lambda image: program(image)[0])


def run(path: str, to: str, images: np.ndarray) -> tuple[np.ndarray, str]:
    """The logits that the file computes, and the program that ran it; ONNX needs onnxruntime."""
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
        raise UserError(
            f'ONNX needs a package that cannot be imported ({error}): pip install -e ".[onnx]"',
            kind='missing',
            value=name,
        ) from error
