"""Which implementations compute the parts of a transformer, where the config leaves that open.

docs/performance.md has the measurements. None changes more than rounding and, with
linear_kernel=gpu, which random numbers dropout draws.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# Linear layers by `cpu` take 0.6 of the time of `xla` in bfloat16, on a processor with instructions
# for it, and more in float32 (jax 0.10.1, S/16). On an H200 attention by `cudnn` trains B/16 1.28
# times as fast as `xla`; linear layers by `gpu` besides 1.16 times with dropout, 1.08 without.
LINEAR_ON_CPU = {'bfloat16': 'cpu', 'float32': 'xla'}
# Of XLA with linear layers by `gpu`: products by cuBLAS alone, which adds up what follows, too, and
# one for each linear layer. XLA's own split the sum and do not count the time to join its parts.
COMPILER = {'xla_gpu_enable_triton_gemm': False, 'xla_gpu_dot_merger_threshold_mb': 0}


def fastest(
    model: Mapping[str, Any], platform: str, device: jax.Device | None = None
) -> dict[str, str]:
    """Values of the fields attention_kernel and linear_kernel on 'cpu', 'gpu' or 'tpu'.

    `model` are all fields of a model, as `config.model` has them; {} for a ResNet, which has no
    such fields. `device` is what computes, None where it is only simulated. On a GPU
    linear layers are computed by xla where the model asks for another attention kernel than cudnn.
    """
    if 'attention_kernel' not in model:
        return {}
    if platform == 'cpu':
        return {'attention_kernel': 'cpu', 'linear_kernel': LINEAR_ON_CPU[model['dtype']]}
    left_open = model['attention_kernel'] in ('auto', 'cudnn')
    if left_open and device is not None and has_cudnn(device) and not beyond_cudnn(model):
        return {'attention_kernel': 'cudnn', 'linear_kernel': 'gpu'}
    return {'attention_kernel': 'xla', 'linear_kernel': 'xla'}


def compiler_options(model: nn.Module) -> dict[str, Any] | None:
    """What XLA is told where it compiles a step of a model, but for what XLA_FLAGS says."""
    block = getattr(getattr(model, 'vit', model), 'block', None)  # vit: of masked.MaskedPatches
    if block is None or block.linear_kernel != 'gpu':
        return None
    flags = os.environ.get('XLA_FLAGS', '')
    return {name: value for name, value in COMPILER.items() if name not in flags}


def beyond_cudnn(model: Mapping[str, Any]) -> list[str]:
    """What attention by cudnn does not compute of a model, and what it expects instead."""
    head = model['hidden_size'] // model['num_heads']
    return [
        f'{what} (expected {expected})'
        for fits, what, expected in (
            (model['dtype'] == 'bfloat16', f'model.dtype {model["dtype"]}', 'bfloat16'),
            (head <= 128 and head % 8 == 0, f'heads of size {head}', '8, 16, ... or 128'),
            (model['attention'] == 'full', f'model.attention {model["attention"]}', 'full'),
            (model['position'] != 'relative', 'model.position relative', 'another'),
            (not model['attention_dropout_rate'], 'model.attention_dropout_rate', '0'),
        )
        if not fits
    ]


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
