"""What depends on the machine, where the config leaves the choice: one table, and how it is kept.

docs/performance.md has the measurements. Nothing here changes more than the order of sums.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib

# The value of a field that leaves the choice.
OPEN = {'unroll': 0, 'remat_policy': 'auto'}
# Without their loops, models of many layers and ResNets take minutes to compile.
MOST_LAYERS = 12

# By platform. CPU, jax 0.10.1, Ti/16 in float32: 1.09 times the speed without the loop over layers,
# 0.85 times with `products`, which computes masks of dropout, GELUs and attention weights again.
# TPU (v5e, by its compiler), B/16 in bfloat16: the activations of an image need 0.050 GiB with
# `products` and 0.183 with `none`. GPU: as TPU, not measured.
CHOICES = {'cpu': {'unroll': MOST_LAYERS, 'remat_policy': 'none'},
           'gpu': {'unroll': 1, 'remat_policy': 'products'},
           'tpu': {'unroll': 1, 'remat_policy': 'products'}}


def for_platform(config: ConfigDict, platform: str) -> FrozenConfigDict:
    """The config with what it leaves open in `model` chosen for 'cpu', 'gpu' or 'tpu'.

    Platforms that the table does not have are treated as GPUs.
    """
    model, choices = config.model, CHOICES.get(platform, CHOICES['gpu'])
    if model.resnet is not None or model.num_layers > MOST_LAYERS:
        choices = choices | {'unroll': 1}
    return FrozenConfigDict(config_lib.changed(config, {
        f'model.{field}': choices[field] for field in OPEN if is_open(model, field)}))


def kept(model: ConfigDict, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What a continued run goes on with: the choices that it has recorded, by dotted field.

    `model` and `recorded` are `config.model`, today's and that of the workdir.
    """
    return {f'model.{field}': recorded[field] for field in OPEN
            if is_open(model, field) and field in recorded}


def is_open(model: Mapping[str, Any], field: str) -> bool:
    """Whether `config.model` leaves the choice of one of the fields in OPEN."""
    return model[field] == OPEN[field]
