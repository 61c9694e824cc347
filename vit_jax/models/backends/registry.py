"""The backends by their names in a config, and the fastest for a device.

docs/performance.md has the measurements. No backend changes more than rounding and, with
linear_kernel=gpu, which random numbers dropout draws.
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
# By model.linear_kernel. 'auto' is xla where training/device_defaults.py does not choose.
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
    """The fields of a Backend that say how attention is computed."""

    attend: Callable[..., Array]
    padding: Callable[[int], int]
    unfit: Callable[[Mapping[str, Any]], list[str]]


# By model.attention_kernel: what replaces fields of these.
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
# Linear layers by `cpu` take 0.6 of the time of `xla` in bfloat16, on a processor with instructions
# for it, and more in float32 (jax 0.10.1, S/16). On an H200 attention by `cudnn` trains B/16 1.28
# times as fast as `xla`; linear layers by `gpu` besides 1.16 times with dropout, 1.08 without.
LINEAR_ON_CPU = {'bfloat16': 'cpu', 'float32': 'xla'}


def get(attention_kernel: str, linear_kernel: str) -> Backend:
    """The backend of two fields of `config.model`; their values are keys of the tables above."""
    return dataclasses.replace(LINEAR[linear_kernel], **ATTENTION[attention_kernel])


def fastest(
    model: Mapping[str, Any], platform: str, device: jax.Device | None = None
) -> dict[str, str]:
    """Values of the fields attention_kernel and linear_kernel on 'cpu', 'gpu' or 'tpu'.

    Args:
      model: all fields of a model, as `config.model` has them. A ResNet has no such fields, and
        gets {}.
      platform: that of the devices, which a mesh may only simulate.
      device: what computes; None where it is only simulated.

    On a GPU linear layers are computed by xla where the model asks for another attention kernel
    than cudnn.
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
    """Whether cuDNN computes attention on a device: on NVIDIA GPUs from Ampere on, if installed."""
    capability = getattr(device, 'compute_capability', '')  # NVIDIA's are as 9.0, AMD's as gfx90a
    if not re.match(r'[89]\.|\d\d', str(capability)):
        return False
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(lambda x: jax.nn.dot_product_attention(x, x, x, implementation='cudnn'), x)
    except RuntimeError:  # it is not installed
        return False
    return True
