"""Defaults that depend on the machine, for fields that the config leaves open.

docs/lab-notes/cpu-speed.md has the measurements. The defaults change results by rounding only,
except that linear_kernel=gpu draws other random numbers for dropout. A resumed run keeps
model.dtype, which decides about rounding, on every machine.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import machine
from vit_jax.errors import UserError
from vit_jax.models import OPEN
from vit_jax.models.backends import registry
from vit_jax.processes import consensus
from vit_jax.workdir import record

# Models of more layers, and ResNets, take minutes to compile without their loops. On a GPU the 32
# layers of H/14 take one minute.
MOST_LAYERS = 12

# The choices by platform. These measurements explain them: cpu (jax 0.10.1, Ti/16, float32):
# without the loop over layers 1.09 times as fast; with   `products`, which recomputes dropout
# masks, GELUs and attention weights, 0.85 times as fast. tpu (v5e, by its compiler, B/16,
# bfloat16): activations of an image need 0.050 GiB with   `products` and 0.183 GiB with `none`.
# cudnn, a GPU with attention by cuDNN (H200, jax 0.11.2, B/16, bfloat16): 1.27 times as fast
# without the loop, which copies the arrays that it keeps, and without `products`. gpu, other GPUs:
# as for tpu; not measured. models/backends/registry.py chooses the kernels.
CHOICES = {
    'cpu': {'unroll': MOST_LAYERS, 'remat_policy': 'none'},
    'cudnn': {'unroll': 48, 'remat_policy': 'none'},
    'gpu': {'unroll': 1, 'remat_policy': 'products'},
    'tpu': {'unroll': 1, 'remat_policy': 'products'},
}
# JAX shows a CPU of at least this many cores as this many devices, because one device leaves cores
# idle in everything that XLA does not divide. More devices are not measured.
HOST_DEVICES = 2
# Hidden size above which one device trains as fast as two (measured with B/16): two devices update
# twice as many parameters and must sum gradients.
WIDEST = 384


def host_devices(configs: Mapping[str, ConfigDict], trains: bool = True) -> int:
    """Number of CPU devices that JAX should show in a process that runs these configs.

    The configs decide if they set mesh.host_devices. Otherwise the smallest number that their runs
    have recorded is used. If none has started, the number is HOST_DEVICES if the machine has as
    many cores, every batch can be split over them and, for training, no model is wider than WIDEST;
    else 1.

    Args:
      configs: the configs of the runs, by workdir.
      trains: whether the process trains the models.

    Raises:
      UserError: if the configs set different numbers.
    """
    numbers = sorted({config.mesh.host_devices for config in configs.values()})
    if len(numbers) > 1:
        raise UserError(
            f'mesh.host_devices is {numbers} for runs of one process: expected the same number '
            'for all of them. Train the runs of each number by a separate command.',
            kind='value',
            field='mesh.host_devices',
            value=numbers,
        )
    if numbers[0]:
        return numbers[0]
    recorded = [_recorded_host_devices(workdir) for workdir in configs]
    recorded = [number for number in recorded if number]
    if recorded:
        return min(recorded)
    return min(_best_host_devices(config, trains) for config in configs.values())


def devices_for_batch(size: int) -> int:
    """HOST_DEVICES if it divides the batch size and there are as many cores; else 1."""
    if machine.cores() >= HOST_DEVICES and size % HOST_DEVICES == 0:
        return HOST_DEVICES
    return 1


def _recorded_host_devices(workdir):
    """The number that a run has recorded: 0 without a run, 1 for a run without the field."""
    if not workdir:
        return 0
    with contextlib.suppress(UserError):  # the run itself will raise it
        begun = record.begun(workdir)
        if begun:
            return begun[0].get('mesh', {}).get('host_devices', 1)
    return 0


def _best_host_devices(config, trains):
    has_default_mesh = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (-1, 1, 1)
    is_wide = config.model.get('hidden_size', 0) > WIDEST  # ResNets have no such field
    if not has_default_mesh or (trains and is_wide):
        return 1
    return devices_for_batch(config.batch_size // max(config.accum_steps, 1))


def shown_devices(expected: int) -> int:
    """Number of CPU devices that JAX shows, for `mesh.host_devices`; 0 on accelerators.

    Args:
      expected: the number that the config sets; 0 for any.

    Raises:
      UserError: if JAX shows another number.
    """
    if jax.default_backend() != 'cpu':
        return 0
    shown = jax.local_device_count()
    if expected not in (0, shown):
        raise UserError(
            f'mesh.host_devices is {expected}, and JAX has started with {shown}: '
            'JAX_NUM_CPU_DEVICES and --xla_force_host_platform_device_count in XLA_FLAGS take '
            'precedence. Remove these, or the field. In a notebook, and on a machine with a GPU, '
            f'start with JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={expected}.',
            kind='value',
            field='mesh.host_devices',
            value=expected,
        )
    return shown


def fastest_dtype(platform: str) -> str:
    """The fastest model.dtype on 'cpu', 'gpu' or 'tpu': bfloat16, or float32 on some CPUs.

    Several processes on CPUs all use float32 if it is faster for one of them.
    """
    if platform != 'cpu' or all(consensus.gather(machine.is_fast_in_bfloat16())):
        return 'bfloat16'
    return 'float32'


def for_platform(
    model: Mapping[str, Any],
    platform: str,
    device: jax.Device | None = None,
    dtype: str = 'float32',
) -> dict[str, Any]:
    """The defaults of the fields that `config.model` leaves open, by dotted field.

    Args:
      model: `config.model` of a checked config.
      platform: the platform of the devices, which a mesh may only simulate: 'cpu', 'gpu' or 'tpu'.
        Others are treated as GPUs.
      device: one of the devices, see registry.fastest.
      dtype: the dtype from `fastest_dtype`; the choice of kernels depends on it.
    """
    if not is_open(model, 'dtype'):
        dtype = model['dtype']
    fastest = registry.fastest({**model, 'dtype': dtype}, platform, device)
    has_resnet = model['resnet'] and model['resnet']['units']
    unroll = CHOICES['cudnn']['unroll'] if is_open(model, 'unroll') else model['unroll']
    # A loop copies the arrays that it keeps.
    has_loop = has_resnet or model['num_layers'] > unroll
    if fastest.get('attention_kernel') == 'cudnn' and not has_loop:
        platform = 'cudnn'
    choices = CHOICES.get(platform, CHOICES['gpu']) | fastest
    recomputes = not is_open(model, 'remat_policy') and model['remat_policy'] != 'none'
    has_many_layers = has_resnet or model['num_layers'] > choices['unroll']
    # Without a loop, XLA for CPUs keeps the arrays that the backward pass should recompute.
    if has_many_layers or (platform == 'cpu' and recomputes):
        choices = choices | {'unroll': 1}
    choices = choices | {'dtype': dtype}
    return {f'model.{field}': choices[field] for field in OPEN if is_open(model, field)}


def check_kernel(model: Mapping[str, Any], device: jax.Device) -> None:
    """Raises UserError if a device does not have the kernel model.attention_kernel."""
    if model.get('attention_kernel') == 'cudnn' and not registry.has_cudnn(device):
        raise UserError(
            'model.attention_kernel is cudnn, which needs an NVIDIA GPU of compute capability 8.0 '
            f'(Ampere) or higher, and cuDNN; this is {device.platform} ({device.device_kind}), '
            'which has: xla, cpu. Add --config.model.attention_kernel=xla',
            kind='value',
            field='model.attention_kernel',
            value='cudnn',
        )


def kept(model: ConfigDict, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded choices of a run, by dotted field, where the config leaves a field open.

    Args:
      model: `config.model` of the command.
      recorded: `config.model` in the workdir. Versions without a kernel field used xla.
    """
    recorded = {'attention_kernel': 'xla', 'linear_kernel': 'xla'} | dict(recorded)
    return {
        f'model.{field}': recorded[field]
        for field in OPEN
        if is_open(model, field) and field in recorded
    }


def is_open(model: Mapping[str, Any], field: str) -> bool:
    """Whether `config.model` leaves the choice of a field of models.OPEN to the machine."""
    return field in model and model[field] == OPEN[field]
