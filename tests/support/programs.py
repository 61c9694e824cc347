"""Tiny programs of every model family on meshes of the eight test devices."""

import jax
import numpy as np

from tests.support.runs import resolved
from vit_jax import config as config_lib
from vit_jax.objectives import registry
from vit_jax.parallel import sharding
from vit_jax.training import resolve
from vit_jax.training.program import Program

VIT = dict(patch_size=(4, 4), hidden_size=32, num_layers=3, mlp_dim=64, num_heads=4)
# Its first unit has a projection; hybrids have 1x1 patches of its features.
SMALL_RESNET = dict(units=(2, 1), width=8, num_groups=4)

MESHES = {
    'data': dict(data=8, fsdp=1, tensor=1),
    'fsdp': dict(data=1, fsdp=8, tensor=1),
    'tensor': dict(data=2, fsdp=1, tensor=4),
    'mixed': dict(data=2, fsdp=2, tensor=2),
}


def small_config(family='vit', **fields):
    """The complete config of a tiny model of a family, trained with SGD."""
    config = config_lib.base({'vit': 'b16', 'hybrid': 'r50_b16', 'resnet': 'r50x1'}[family])
    config.update(batch_size=16, num_steps=10, image_size=(32, 32))
    config.model.unroll = 1  # it compiles faster
    config.dataset.update(num_examples=1000, num_classes=6)
    config.optimizer.update(name='sgd', learning_rate=0.1, schedule='constant')
    if family == 'vit':
        config.model.update(VIT)
    elif family == 'hybrid':
        config.model.update(VIT, patch_size=(1, 1))
    if family != 'vit':
        config.model.resnet.update(SMALL_RESNET)
    config.update_from_flattened_dict(fields)
    return resolved(config, 1000, 6)


def program_on(config, teacher=None, **mesh):
    """The program on the first of the eight devices, as many as the mesh needs."""
    number = int(np.prod(list(mesh.values())))
    config = config_lib.changed(config, {f'mesh.{axis}': size for axis, size in mesh.items()})
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:number])
    config = resolve.for_mesh(config, mesh, teacher=teacher)
    return Program(config, mesh, objective=registry.of_config(config, teacher))
