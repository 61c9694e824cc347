"""The device mesh and how arrays are split over it: batches, the training state, activations.

The mesh has three axes. Over `data` and `fsdp` the batch is split; over `fsdp` also every large
parameter, its gradient and its optimizer state, gathered where they are used; over `tensor` the
heads and the hidden layers of the MLPs, so that each device computes some of them.
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

# Names of the last axes of a parameter, by the end of its path; axes before them (layers) are never
# split. What matches no line (scales, most biases, small position embeddings) is whole everywhere.
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

# Which of these each mesh axis splits: the first one that it divides and that is not yet split.
# fsdp splits only what has an axis 'embed': a bias is not worth a message.
SPLITS = (
    ('tensor', ('heads', 'mlp')),
    ('fsdp', ('embed', 'mlp', 'inputs', 'heads', 'head_dim', 'classes')),
)

# How models.* may name the axes of their activations, and what splits them.
ACTIVATIONS = (('batch', ('data', 'fsdp')), ('heads', 'tensor'), ('mlp', 'tensor'))


def make_mesh(config: ConfigDict, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of `config.mesh` over some devices, by default all of all processes.

    Raises UserError when the sizes do not multiply to the number of devices; one may be -1.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {name: config[name] for name in AXES}
    left = len(devices) // max(1, math.prod(size for size in sizes.values() if size != -1))
    shape = tuple(left if size == -1 else size for size in sizes.values())
    if list(sizes.values()).count(-1) > 1 or min(shape) < 1 or math.prod(shape) != len(devices):
        raise UserError(
            f'mesh {sizes} does not fit {len(devices)} devices: the sizes must '
            'multiply to that number, and one of them may be -1 to take what is left.'
        )
    types = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, devices=devices, axis_types=types)
    except NotImplementedError:  # 16 x 16 on a torus of 4 x 8 x 8: a side of it has to be cut
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=types)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples are spread over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))


def batch_parts(mesh: Mesh) -> int:
    """Number of parts that batch_sharding cuts a batch into."""
    return mesh.shape['data'] * mesh.shape['fsdp']


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def abstract(tree: PyTree, mesh: Mesh) -> PyTree:
    """The arrays of a training state, or parameters alone, as shapes with their NamedSharding.

    They are jax.ShapeDtypeStruct; for the result those of `tree` suffice. The path of optimizer
    state ends with that of the parameter to which it belongs.
    """
    return jax.tree.map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*_split(_axes(path), x.shape, mesh))),
        ),
        tree,
    )


def unsplit(params: PyTree, mesh: Mesh) -> list[str]:
    """Large parameters that the fsdp axis does not divide, as 'path (shape)'."""
    return [
        f'{_name(path)} {tuple(x.shape)}'
        for path, x in jax.tree.leaves_with_path(params)
        if mesh.shape['fsdp'] > 1
        and 'embed' in (axes := _axes(path))
        and 'fsdp' not in _split(axes, x.shape, mesh)
    ]


@contextlib.contextmanager
def on_mesh(mesh: Mesh):
    """A context in which a model is traced with its activations split as ACTIVATIONS says."""
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
            f'devices (data x fsdp){accumulated}: take {possible}, or other devices.'
        )


def check_model(config: Mapping, mesh: Mesh, name: str = 'model') -> None:
    """Raises UserError unless the tensor axis divides the heads and MLPs of a model.

    `config` are its fields, as `config.model`; messages call it `name`.
    """
    tensor = mesh.shape['tensor']
    if tensor > 1 and 'num_heads' not in config:
        raise UserError(
            f'mesh.tensor is {tensor}, which splits attention heads and MLPs, and this '
            'model has none: set mesh.tensor=1 and use mesh.fsdp.'
        )
    for field in ('num_heads', 'mlp_dim'):
        if config.get(field, 0) % tensor:
            raise UserError(
                f'{name}.{field} {config[field]} is not divisible by mesh.tensor '
                f'{tensor}. Choose a tensor axis that divides '
                f'{math.gcd(config["num_heads"], config["mlp_dim"])}.'
            )


def bytes_per_device(tree: PyTree) -> int:
    """Bytes that one device holds of the arrays of a tree, by their shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/')


def _axes(path):
    """Names of the last axes of a parameter, () where nothing is to be split."""
    if any(str(part) in ('.v_row', '.v_col') for part in path):  # of Adafactor, and small
        return ()
    return next(
        (axes for pattern, axes in PARAMETERS if re.search(rf'(^|/){pattern}$', _name(path))), ()
    )


def _split(axes, shape, mesh):
    """The mesh axis of every axis of an array, None where it is not split."""
    first = len(shape) - len(axes)
    split = [None] * len(shape)
    if first < 0:  # a factor of a moment, or what stands in its place
        return split
    for mesh_axis, candidates in SPLITS:
        size = mesh.shape[mesh_axis]
        if size == 1 or (mesh_axis == 'fsdp' and 'embed' not in axes):
            continue
        fits = [
            d
            for name in candidates
            if name in axes
            and split[d := first + axes.index(name)] is None
            and shape[d] % size == 0
        ]
        if fits:
            split[fits[0]] = mesh_axis
    return split
