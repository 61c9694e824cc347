"""The backends by their names in a config, and the fastest one for a device.

All backends compute the same function up to rounding; with linear_kernel=gpu dropout draws other
random numbers. docs/lab-notes/cpu-speed.md has the measurements.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from vit_jax.models.attention import Attention
from vit_jax.models.backends import cpu, gpu, gpu_dropout, xla
from vit_jax.models.backends.backend import Backend
from vit_jax.models.dropout import Dropout

XLA = Backend(
    dense=nn.DenseGeneral,
    patches=xla.patches,
    norm=nn.LayerNorm,
    gelu=xla.gelu,
    dropout=Dropout,
    attention=Attention,
    attend=xla.attend,
)
# By model.linear_kernel. 'auto' is 'xla' unless training/device_defaults.py chooses another value.
LINEAR = {
    'auto': XLA,
    'xla': XLA,
    'cpu': dataclasses.replace(
        XLA, dense=cpu.Dense, patches=cpu.Patches, norm=cpu.LayerNorm, gelu=cpu.gelu
    ),
    'gpu': dataclasses.replace(
        XLA,
        dense=gpu.Dense,
        patches=gpu.Patches,
        gelu=gpu.gelu,
        dropout=gpu_dropout.Dropout,
        attention=gpu.GpuAttention,
        remat_hidden=gpu.remat_hidden,
        compiler_options=gpu.compiler_options,
    ),
}


class AttentionFields(TypedDict, total=False):
    """The fields of a Backend that implement attention."""

    attend: Callable[..., Array]
    padding: Callable[[int], int]
    unfit: Callable[[Mapping[str, Any]], list[str]]


# By model.attention_kernel: fields that replace the fields of the backend in LINEAR.
ATTENTION: dict[str, AttentionFields] = {
    'auto': {},
    'xla': {},
    'cpu': {'attend': cpu.attend},
    'cudnn': {
        'attend': gpu.attend_by_cudnn,
        'padding': gpu.padding,
        'unfit': gpu.beyond_cudnn,
    },
}
# Measurements: on a CPU with bfloat16 instructions the linear layers of `cpu` take 0.6 of the time
# of `xla` in bfloat16, and more time in float32 (jax 0.10.1, S/16). On an H200 B/16 trains 1.28
# times as fast with attention by `cudnn` as by `xla`. The linear layers of `gpu` make training
# faster by a further factor of 1.16 with dropout and 1.08 without.
LINEAR_ON_CPU = {'bfloat16': 'cpu', 'float32': 'xla'}


def get(attention_kernel: str, linear_kernel: str) -> Backend:
    """Returns the backend for a key of ATTENTION and a key of LINEAR."""
    return dataclasses.replace(LINEAR[linear_kernel], **ATTENTION[attention_kernel])


def fastest(
    model: Mapping[str, Any], platform: str, device: jax.Device | None = None
) -> dict[str, str]:
    """Returns the fastest values of the fields attention_kernel and linear_kernel.

    On a GPU the linear layers are xla's unless attention is cudnn's.

    Args:
      model: all fields of `config.model`.
      platform: 'cpu', 'gpu' or 'tpu', the platform of the real or simulated devices.
      device: one of the devices; None if they are simulated.

    Returns:
      Both fields by name; {} for a ResNet, which has neither.
    """
    if 'attention_kernel' not in model:
        return {}
    if platform == 'cpu':
        return {'attention_kernel': 'cpu', 'linear_kernel': LINEAR_ON_CPU[model['dtype']]}
    is_free = model['attention_kernel'] in ('auto', 'cudnn')
    if is_free and device is not None and has_cudnn(device) and not gpu.beyond_cudnn(model):
        return {'attention_kernel': 'cudnn', 'linear_kernel': 'gpu'}
    return {'attention_kernel': 'xla', 'linear_kernel': 'xla'}


def has_cudnn(device: jax.Device) -> bool:
    """Whether a device is an NVIDIA GPU from Ampere on, and cuDNN is installed."""
    capability = getattr(device, 'compute_capability', '')  # 9.0 for NVIDIA, gfx90a for AMD
    if not re.match(r'[89]\.|\d\d', str(capability)):
        return False
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(lambda x: jax.nn.dot_product_attention(x, x, x, implementation='cudnn'), x)
    except RuntimeError:  # cuDNN is not installed
        return False
    return True
