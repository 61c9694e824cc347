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
from typing import Any

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
    write_onnx(onnx_program(weights), weights, path)


def onnx_program(weights: Weights) -> Any:
    """The model as an onnx.ModelProto from `images` to `logits`.

    Raises UserError if jax2onnx is not installed or cannot convert the model.
    """
    _check_dtype(weights)
    return _onnx_program(weights, function(weights))


def unrolled_onnx_program(weights: Weights) -> Any:
    """The model as an onnx.ModelProto in float32 without a loop over the layers.

    The tools of onnxruntime cannot change the dtype of arrays that a loop uses. Each layer has its
    own arrays here, so that they can. Raises UserError as onnx_program does, and for a model
    that is too large for these tools.
    """
    size = sum(x.nbytes for x in jax.tree.leaves(weights.params))
    if size > LARGEST_FILE:
        raise UserError(
            f'{weights.source} has parameters of {size / 1e9:.1f} GB in float32: float16 and int8 '
            f'are for models up to {LARGEST_FILE / 1e9:.1f} GB. Use --dtype=bfloat16.',
            kind='inapplicable',
            field='--dtype',
            file=weights.source,
            value=size,
        )
    return _onnx_program(weights, function(weights, is_unrolled=True))


def _onnx_program(weights, program):
    """`program` as an onnx.ModelProto from `images` to `logits`."""
    jax2onnx = import_package('jax2onnx')
    _check_convertible(weights)
    for name in ('jax2onnx', 'onnx_ir'):  # their warnings do not concern users
        logging.getLogger(name).setLevel(logging.ERROR)
    converted = jax2onnx.to_onnx(
        program,
        inputs=[('batch', *_image_shape(weights))],
        model_name='vit_jax',
        input_names=['images'],
        output_names=['logits'],
    )
    drop_unused(converted.graph)
    return converted


def write_onnx(program: Any, weights: Weights, path: str) -> None:
    """Writes an onnx.ModelProto with preparation.metadata of the weights; see `save`."""
    onnx = import_package('onnx')
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


def _check_convertible(weights):
    """Raises UserError for a model that jax2onnx cannot convert."""
    if weights.model['resnet']:
        raise UserError(
            'jax2onnx cannot convert the max-pooling of a ResNet for batches of any '
            'size: hybrids and ResNets go to stablehlo only.',
            kind='inapplicable',
            field='--to',
            value='onnx',
        )


def _check_dtype(weights):
    """Raises UserError for arrays that jax2onnx cannot write."""
    if any(x.dtype == np.float16 for x in jax.tree.leaves(weights.params)):
        raise UserError(
            'jax2onnx writes float16 arrays with the type of float32: add '
            '--dtype=float32 or --dtype=bfloat16.',
            kind='inapplicable',
            field='--dtype',
            value='float16',
        )


def drop_unused(graph: Any) -> set[str]:
    """Removes constants that no node of an onnx.GraphProto uses, because onnxruntime warns of them.

    Returns the names that the graph uses.
    """
    used = {output.name for output in graph.output}
    for node in graph.node:
        used.update(node.input)
        for attribute in node.attribute:
            if attribute.HasField('g'):
                used |= drop_unused(attribute.g)
    for k in reversed(range(len(graph.initializer))):
        if graph.initializer[k].name not in used:
            del graph.initializer[k]
    return used


def _image_shape(weights):
    return (*weights.image_size(), weights.channels())


def function(weights: Weights, is_unrolled: bool = False) -> Callable[[jax.Array], jax.Array]:
    """A function from images to logits without Flax layers in its trace.

    The model is traced for a single image, and vmap adds a batch of unknown size. jax2onnx would
    replace Flax's layers by its own operations, which do not support vmap. With `is_unrolled`, the
    trace has no loop over the layers, and the arrays of each layer are constants in it.
    """
    model = models.build(weights.model, weights.num_classes, dtype='float32')
    params = jax.tree.map(jnp.asarray, weights.params)
    image = jax.ShapeDtypeStruct(_image_shape(weights), jnp.float32)

    def logits(image):
        return model.apply({'params': params}, image[None])[0]

    if is_unrolled:
        # Without jit a scan is a Python loop; computed at once, slices of arrays are constants.
        with jax.disable_jit(), jax.ensure_compile_time_eval():
            trace = jax.make_jaxpr(logits)(image)
    else:
        trace = jax.make_jaxpr(logits)(image)
    program = jax.extend.core.jaxpr_as_fun(trace)
    return jax.vmap(lambda image: program(image)[0])


def run(path: str, to: str, images: np.ndarray) -> tuple[np.ndarray, str]:
    """The logits that the file computes, and the program that ran it; ONNX needs onnxruntime."""
    if to == 'onnx':
        return session(path).run(['logits'], {'images': images})[0], _onnxruntime_version()
    exported = jax.export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
    return np.asarray(exported.call(images)), f'jax.export of jax {jax.__version__}'


def run_on_photo(path: str, photo: np.ndarray) -> tuple[np.ndarray, str]:
    """The probabilities [classes] by an ONNX file with the preparation, and what ran it.

    `photo` is uint8 [height, width, 3].
    """
    (probabilities,) = session(path).run(['probabilities'], {'photo': photo})
    return probabilities[0], _onnxruntime_version()


def session(path: str) -> Any:
    """An onnxruntime.InferenceSession of an ONNX file, on the CPU."""
    runtime = import_package('onnxruntime')
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors
    return runtime.InferenceSession(path, options, providers=['CPUExecutionProvider'])


def _onnxruntime_version():
    return f'onnxruntime {import_package("onnxruntime").__version__}'


def import_package(name: str) -> Any:
    """A module of the extra `onnx`; UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f'ONNX needs a package that cannot be imported ({error}): pip install -e ".[onnx]"',
            kind='missing',
            value=name,
        ) from error
