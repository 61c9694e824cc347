"""Devices to compile for: a TPU slice that the compiler knows, or simulated CPU devices."""

import contextlib
import importlib.util
import itertools
import math
import os

import jax

from vit_jax.errors import UserError
from vit_jax.training import chips

# 2-D slices, and 3-D slices of fewer than 64 chips. Larger 3-D slices consist of 4x4x4 cubes.
SHAPES = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
}
CUBE_SIDE = 4  # in chips
LONGEST_SIDE = 24  # in chips
MOST_SIMULATED = 2048  # JAX numbers the CPU devices of other processes from here on


def shapes(chip: chips.Chip) -> dict[int, tuple[int, ...]]:
    """Returns the most compact TPU slice for every possible number of chips."""
    candidates = list(SHAPES[chip.dims])
    if chip.dims == 3:
        sides = range(CUBE_SIDE, LONGEST_SIDE + 1, CUBE_SIDE)
        candidates += sorted(itertools.combinations_with_replacement(sides, 3), key=sum)
    most_compact: dict[int, tuple[int, ...]] = {}
    for shape in candidates:  # the most compact first
        most_compact.setdefault(math.prod(shape), shape)
    return {size: most_compact[size] for size in sorted(most_compact) if size <= chip.largest}


def shape_of(name: str, devices: int, topology: str = '') -> tuple[int, ...]:
    """Returns the shape of a TPU slice.

    Args:
      name: a key of chips.CHIPS.
      devices: number of chips.
      topology: a shape such as '4x8x8'; '': the most compact shape.

    Raises:
      UserError: there is no such slice. The message names the nearest sizes.
    """
    chip = chips.CHIPS[name]
    valid = shapes(chip)
    if not topology and devices in valid:
        return valid[devices]
    nearest = sorted(valid, key=lambda size: abs(math.log(size / max(devices, 1))))[:4]
    slices = ', '.join(f'{size} ({_topology(valid[size])})' for size in sorted(nearest))
    if not topology:
        raise UserError(
            f'--devices is {devices}: {name} has no slice of this size. The nearest slices are: '
            f'{slices}.',
            kind='value',
            field='--devices',
            value=devices,
        )
    try:
        shape = tuple(int(side) for side in topology.split('x'))
    except ValueError:
        shape = ()
    if len(shape) != chip.dims or math.prod(shape) != devices:
        raise UserError(
            f'--topology is {topology}, which is not a slice of {devices} {name} chips: expected '
            f'{chip.dims} numbers with x between them whose product is --devices. '
            f'Slices: {slices}.',
            kind='value',
            field='--topology',
            value=topology,
        )
    return shape


def _topology(shape):
    """The name of a shape: '4x8x8' for (4, 8, 8)."""
    return 'x'.join(map(str, shape))


def tpu_devices(name: str, shape: tuple[int, ...]) -> list[jax.Device]:
    """Returns the devices of a TPU slice, which need not exist.

    Sets environment variables of libtpu.

    Raises:
      UserError: libtpu is missing, or does not support the slice.
    """
    if importlib.util.find_spec('libtpu') is None:
        raise UserError(
            "Compiling for TPUs needs libtpu: pip install -e '.[plan]'. Or add --simulate for a "
            'rougher estimate with simulated devices of this host.',
            kind='missing',
            value='libtpu',
        )
    variables = {
        'TPU_SKIP_MDS_QUERY': '1',  # there is no metadata server
        'TPU_LOG_DIR': 'disabled',
        'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # several plans may run together: none opens a device
        'TPU_ACCELERATOR_TYPE': f'{name}-8',
        'TPU_WORKER_HOSTNAMES': 'localhost',
    }
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    options: dict[str, str | tuple[int, ...]] = {}
    if name == 'v4':
        options['chip_config_name'] = 'megacore'  # both cores of a chip are one device
    if math.prod(shape) == 1:
        options['chips_per_host_bounds'] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(
            platform='tpu', topology_name=f'{name}:{_topology(shape)}', **options
        ).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f'libtpu does not support {_topology(shape)} chips of {name}: {error}',
            kind='value',
            field='--topology',
            value=_topology(shape),
        ) from error


def simulated_devices(number: int) -> list[jax.Device]:
    """Returns simulated CPU devices.

    Raises:
      UserError: the number is too large, or JAX has already started with fewer devices.
    """
    if number > MOST_SIMULATED:
        raise UserError(
            f'--devices is {number:,}: expected at most {MOST_SIMULATED:,} simulated devices. Plan '
            'for this maximum, with a batch size in proportion.',
            kind='value',
            field='--devices',
            value=number,
        )
    with contextlib.suppress(RuntimeError):  # JAX has started, perhaps with enough devices
        jax.config.update('jax_num_cpu_devices', number)
    devices = jax.devices('cpu')
    if len(devices) < number:
        raise UserError(
            f'--devices is {number}, and JAX has started in this process with {len(devices)} '
            'devices. Plan in a new process.',
            kind='value',
            field='--devices',
            value=number,
        )
    return devices[:number]
