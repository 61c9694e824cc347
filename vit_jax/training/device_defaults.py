"""What depends on the machine, where the config leaves the choice: one table, and how it is kept.

docs/performance.md has the measurements. Nothing here changes more than rounding and, with
linear_kernel=gpu, which random numbers dropout draws. How numbers are rounded, model.dtype, is the
only choice that a run keeps on every machine.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib
from vit_jax import machine
from vit_jax.errors import UserError
from vit_jax.models import OPEN
from vit_jax.models.backends import registry
from vit_jax.processes import consensus
from vit_jax.workdir import record

# Without their loops, models of many layers and ResNets take minutes to compile; on a GPU H/14, of
# 32 layers, took one.
MOST_LAYERS = 12

# By platform. CPU, jax 0.10.1, Ti/16 in float32: 1.09 times the speed without the loop over layers,
# 0.85 times with `products`, which computes masks of dropout, GELUs and attention weights again.
# TPU (v5e, by its compiler), B/16 in bfloat16: the activations of an image need 0.050 GiB with
# `products` and 0.183 with `none`. GPU with attention by cudnn (H200, jax 0.11.2, B/16, bfloat16):
# 1.27 times the speed without the loop, which copies what it keeps, and `products`. Other GPUs: as
# TPU, not measured. models/backends/registry.py has the rest.
CHOICES = {
    'cpu': {'unroll': MOST_LAYERS, 'remat_policy': 'none'},
    'cudnn': {'unroll': 48, 'remat_policy': 'none'},
    'gpu': {'unroll': 1, 'remat_policy': 'products'},
    'tpu': {'unroll': 1, 'remat_policy': 'products'},
}
# JAX shows a CPU of at least this many cores as this many devices: one device leaves cores idle in
# all that XLA does not divide. Not measured with more. Wider models are trained as fast by one
# (B/16): two have twice the parameters to update, and gradients to sum.
HOST_DEVICES, WIDEST = 2, 384


def host_devices(configs: Mapping[str, ConfigDict], trains: bool = True) -> int:
    """How many devices JAX should show the CPU as, for one process that takes these runs in turn.

    `configs` are by workdir. The result is what the configs say; else the smallest number that runs
    which have begun have recorded; else HOST_DEVICES where this process has as many cores, each
    batch can be split over them and, if it `trains`, no model is wider than WIDEST. Raises
    UserError where the configs say different numbers.
    """
    given = sorted({config.mesh.host_devices for config in configs.values()})
    if len(given) > 1:
        raise UserError(
            f'mesh.host_devices is {given} for runs of one process, which can have one '
            'number: train those of each by a command of their own.'
        )
    recorded = [number for workdir in configs if (number := _recorded(workdir))]
    return given[0] or min(recorded or [_best(config, trains) for config in configs.values()])


def devices_for_batch(size: int) -> int:
    """HOST_DEVICES where a batch can be split over them and there are as many cores; else 1."""
    return HOST_DEVICES if machine.cores() >= HOST_DEVICES and size % HOST_DEVICES == 0 else 1


def _recorded(workdir):
    """Of the run that has begun there: 1 if a version without the field began it; 0 if none has."""
    with contextlib.suppress(UserError):  # which the run itself will end with
        if workdir and (begun := record.begun(workdir)):
            return begun[0].get('mesh', {}).get('host_devices', 1)
    return 0


def _best(config, trains):
    free = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (-1, 1, 1)
    if not free or trains and config.model.get('hidden_size', 0) > WIDEST:
        return 1
    return devices_for_batch(config.batch_size // max(config.accum_steps, 1))


def shown_devices(config: ConfigDict) -> int:
    """What `mesh.host_devices` becomes once JAX has started; 0 where it computes on no CPU.

    Raises UserError where the config says another number.
    """
    if jax.default_backend() != 'cpu':
        return 0
    given, shown = config.mesh.host_devices, jax.local_device_count()
    if given not in (0, shown):
        raise UserError(
            f'mesh.host_devices is {given}, and JAX has started with {shown}: JAX_NUM_CPU_DEVICES '
            'and --xla_force_host_platform_device_count in XLA_FLAGS come first. Remove these, or '
            'the field. In a notebook and beside a GPU, start with JAX_PLATFORMS=cpu '
            f'JAX_NUM_CPU_DEVICES={given}.'
        )
    return shown


def fastest_dtype(platform: str) -> str:
    """The fastest model.dtype on 'cpu', 'gpu' or 'tpu': bfloat16, but on some CPUs float32.

    Several processes on CPUs compute in float32 if one of them is faster so.
    """
    if platform != 'cpu' or all(consensus.gather(machine.is_fast_in_bfloat16())):
        return 'bfloat16'
    return 'float32'


def for_platform(
    config: ConfigDict, platform: str, device: jax.Device | None = None, dtype: str = 'float32'
) -> FrozenConfigDict:
    """The config with what it leaves open in `model` chosen for 'cpu', 'gpu' or 'tpu'.

    Platforms that the table does not have are treated as GPUs.

    Args:
      config: checked.
      platform: that of the devices, which a mesh may only simulate.
      device: as in registry.fastest.
      dtype: the fastest one there, from `fastest_dtype`, which decides between kernels, too.
    """
    if is_open(config.model, 'dtype'):
        config = config_lib.changed(config, {'model.dtype': dtype})
    model = config.model
    fastest = registry.fastest(model, platform, device)
    has_resnet = model.resnet and model.resnet.units
    unroll = CHOICES['cudnn']['unroll'] if is_open(model, 'unroll') else model.unroll
    if (
        fastest.get('attention_kernel') == 'cudnn' and not has_resnet and model.num_layers <= unroll
    ):  # a loop would copy what is kept
        platform = 'cudnn'
    choices = CHOICES.get(platform, CHOICES['gpu']) | fastest
    recomputes = not is_open(model, 'remat_policy') and model.remat_policy != 'none'
    # Without a loop XLA for CPUs merges what the backward pass computes again with what was kept.
    if has_resnet or model.num_layers > choices['unroll'] or platform == 'cpu' and recomputes:
        choices = choices | {'unroll': 1}
    return FrozenConfigDict(
        config_lib.changed(
            config, {f'model.{field}': choices[field] for field in OPEN if is_open(model, field)}
        )
    )


def check_kernel(model: Mapping[str, Any], device: jax.Device) -> None:
    """Raises UserError for a model.attention_kernel that a device does not have."""
    if model.get('attention_kernel') == 'cudnn' and not registry.has_cudnn(device):
        raise UserError(
            'model.attention_kernel is cudnn, which is for NVIDIA GPUs from compute '
            f'capability 8.0 (Ampere) on, with cuDNN; this is {device.platform} '
            f'({device.device_kind}), which has: xla, cpu. Add '
            '--config.model.attention_kernel=xla'
        )


def kept(model: ConfigDict, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What a continued run goes on with: the choices that it has recorded, by dotted field.

    `model` and `recorded` are `config.model`, today's and that of the workdir, which versions
    without one of the kernels have begun by xla.
    """
    recorded = {'attention_kernel': 'xla', 'linear_kernel': 'xla'} | dict(recorded)
    return {
        f'model.{field}': recorded[field]
        for field in OPEN
        if is_open(model, field) and field in recorded
    }


def is_open(model: Mapping[str, Any], field: str) -> bool:
    """Whether `config.model` leaves the choice of one of the fields in models.OPEN."""
    return field in model and model[field] == OPEN[field]
