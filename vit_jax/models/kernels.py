"""By which of their implementations the parts of a transformer are computed, where that is open.

docs/performance.md has the measurements. None changes more than rounding.
"""

from collections.abc import Mapping
from typing import Any

# Linear layers by `cpu` take 0.6 of the time of `xla` in bfloat16, on a processor with instructions
# for it, and more in float32 (jax 0.10.1, S/16).
LINEAR_ON_CPU = {'bfloat16': 'cpu', 'float32': 'xla'}


def fastest(model: Mapping[str, Any], platform: str) -> dict[str, str]:
    """Values of the fields attention_kernel and linear_kernel on 'cpu', 'gpu' or 'tpu'.

    `model` are all fields of a model, as `config.model` has them; {} for a ResNet, which has no
    such fields. Attention by cudnn, which NVIDIA GPUs have besides, was not measured.
    """
    if 'attention_kernel' not in model:
        return {}
    if platform != 'cpu':
        return {'attention_kernel': 'xla', 'linear_kernel': 'xla'}
    return {'attention_kernel': 'cpu', 'linear_kernel': LINEAR_ON_CPU[model['dtype']]}
