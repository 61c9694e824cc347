"""The device mesh and the shardings of batches, the training state and activations.

The mesh has three axes:

- `data` splits the batch;
- `fsdp` splits the batch and every large parameter with its gradient and its optimizer state, which
  are gathered where they are used;
- `tensor` splits the attention heads and the hidden layers of the MLPs, so that each device
  computes some of them.
"""

import contextlib
import math
import re
from collections.abc import Mapping

import flax.linen as nn
import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax.errors import UserError

AXES = ('data', 'fsdp', 'tensor')

# Names of the last axes of a parameter, by the end of its path. Earlier axes (layers) are never
# split. Parameters that are not in this table (scales, most biases, small position embeddings) are
# replicated.
PARAMETERS = (
    (r'(query|key|value)/kernel', ('embed', 'heads', 'head_dim')),
    (r'(query|key|value)/bias', ('heads', 'head_dim')),
    (r'out/kernel', ('heads', 'head_dim', 'embed')),
    (r'dense1/kernel', ('embed', 'mlp')),
    (r'dense1/bias', ('mlp',)),
    (r'dense2/kernel', ('mlp', 'embed')),
    (r'(head|patch_head|pre_logits)/kernel', ('embed', 'classes')),
    (r'position/embedding', ('tokens', 'embed')),
    (r'(\w*conv\w*|embedding)/kernel', ('height', 'width', 'inputs', 'embed')),
)

# The axes of a parameter that each mesh axis may split. A mesh axis splits the first of these axes
# that it divides and that is not yet split. fsdp splits only parameters with an axis 'embed',
# because splitting a bias would not be worth the communication.
SPLITS = (
    ('tensor', ('heads', 'mlp')),
    ('fsdp', ('embed', 'mlp', 'inputs', 'heads', 'head_dim', 'classes')),
)

# The names of the axes of activations in models.*, and the mesh axes that split them.
ACTIVATIONS = (('batch', ('data', 'fsdp')), ('heads', 'tensor'), ('mlp', 'tensor'))


def make_mesh(config: ConfigDict, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `config.mesh`.

    Args:
      config: `config.mesh`. One size may be -1 for all remaining devices.
      devices: the devices; None stands for all devices of all processes.

    Raises:
      UserError: if the product of the sizes is not the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    sizes = {name: config[name] for name in AXES}
    fixed_sizes = [size for size in sizes.values() if size != -1]
    remaining = len(devices) // max(1, math.prod(fixed_sizes))
    shape = tuple(remaining if size == -1 else size for size in sizes.values())
    num_free_sizes = len(sizes) - len(fixed_sizes)
    if num_free_sizes > 1 or min(shape) < 1 or math.prod(shape) != len(devices):
        raise UserError(
            f'mesh {sizes} does not fit {len(devices)} devices: the sizes must '
            'multiply to that number; one of them may be -1 for all remaining devices.',
            kind='value',
            field='mesh',
            value=sizes,
        )
    types = (AxisType.Auto, AxisType.Auto, AxisType.Auto)
    try:
        return jax.make_mesh(shape, AXES, devices=devices, axis_types=types)
    except NotImplementedError:  # 16 x 16 on a 4 x 8 x 8 torus would split a side of the torus
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=types)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its examples are split over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def batch_parts(mesh: Mesh) -> int:
    """The number of parts into which batch_sharding splits a batch."""
    return mesh.shape['data'] * mesh.shape['fsdp']


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def abstract(tree: PyTree, mesh: Mesh) -> PyTree:
    """The shapes, dtypes and shardings of a training state, or of parameters alone.

    The path of each array of the optimizer state ends with the path of its parameter.

    Args:
      tree: arrays, or jax.ShapeDtypeStruct.

    Returns:
      The same tree of jax.ShapeDtypeStruct, with shardings.
    """

    def with_sharding(path, x):
        spec = PartitionSpec(*_split(_axes(path), x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map_with_path(with_sharding, tree)


def unsplit(params: PyTree, mesh: Mesh) -> list[str]:
    """Large parameters that the fsdp axis does not divide, as 'path (shape)'."""
    if mesh.shape['fsdp'] == 1:
        return []
    names = []
    for path, x in jax.tree.leaves_with_path(params):
        axes = _axes(path)
        if 'embed' in axes and 'fsdp' not in _split(axes, x.shape, mesh):
            names.append(f'{_name(path)} {tuple(x.shape)}')
    return names


@contextlib.contextmanager
def on_mesh(mesh: Mesh):
    """A context for tracing a model whose activations are split according to ACTIVATIONS."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(ACTIVATIONS):
        yield


def check_batch(batch_size: int, accum_steps: int, mesh: Mesh) -> None:
    """Raises UserError unless every device gets the same number of examples in every part."""
    parts = batch_parts(mesh) * max(accum_steps, 1)
    if batch_size % parts:
        possible = max(parts, batch_size // parts * parts)
        accumulated = f' x {accum_steps} accum_steps' if accum_steps > 1 else ''
        raise UserError(
            f'batch_size {batch_size} is not divisible by {batch_parts(mesh)} '
            f'devices (data x fsdp){accumulated}: use {possible}, or other devices.',
            kind='value',
            field='batch_size',
            value=batch_size,
        )


def check_model(config: Mapping, mesh: Mesh, name: str = 'model') -> None:
    """Raises UserError unless the tensor axis divides the heads and MLPs of a model.

    Args:
      config: the fields of the model, such as `config.model`.
      name: the name of the model in messages.
    """
    tensor = mesh.shape['tensor']
    if tensor == 1:
        return
    if 'num_heads' not in config:
        raise UserError(
            f'mesh.tensor is {tensor}, which splits attention heads and MLPs, but this '
            'model has none: set mesh.tensor=1 and use mesh.fsdp.',
            kind='inapplicable',
            field='mesh.tensor',
            value=tensor,
        )
    for field in ('num_heads', 'mlp_dim'):
        if field in config and config[field] % tensor:
            raise UserError(
                f'{name}.{field} {config[field]} is not divisible by mesh.tensor '
                f'{tensor}. Choose a tensor axis that divides '
                f'{math.gcd(config["num_heads"], config["mlp_dim"])}.',
                kind='value',
                field=f'{name}.{field}',
                value=config[field],
            )


def bytes_per_device(tree: PyTree) -> int:
    """The bytes of the arrays of a tree on one device, according to their shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/')


def _axes(path):
    """Names of the last axes of a parameter; () if the parameter is not split."""
    if any(str(part) in ('.v_row', '.v_col') for part in path):  # small moments of Adafactor
        return ()
    name = _name(path)
    for pattern, axes in PARAMETERS:
        if re.search(rf'(^|/){pattern}$', name):
            return axes
    return ()


def _split(axes, shape, mesh):
    """The mesh axis for every axis of an array; None for an axis that is not split."""
    first_named = len(shape) - len(axes)
    split = [None for _ in shape]
    if first_named < 0:  # a factored moment of an optimizer, or its placeholder
        return split
    for mesh_axis, candidates in SPLITS:
        size = mesh.shape[mesh_axis]
        if size == 1 or (mesh_axis == 'fsdp' and 'embed' not in axes):
            continue
        for name in candidates:
            if name not in axes:
                continue
            axis = first_named + axes.index(name)
            if split[axis] is None and shape[axis] % size == 0:
                split[axis] = mesh_axis
                break
    return split
