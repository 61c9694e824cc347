"""Devices to compile for: a TPU slice that its compiler knows, or simulated CPU devices."""

import contextlib
import importlib.util
import itertools
import math
import os

import jax

from vit_jax.errors import UserError
from vit_jax.training import chips

# Slices of fewer than 64 chips have these shapes; larger 3-D ones are made of cubes of 4x4x4.
SHAPES = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
}
CUBE, LONGEST = 4, 24  # sides, in chips
MOST = 2048  # devices of a CPU: further ones would be those of another process


def shapes(chip: chips.Chip) -> dict[int, tuple[int, ...]]:
    """The most compact slice of a TPU for every possible number of chips."""
    sides = range(CUBE, LONGEST + 1, CUBE) if chip.dims == 3 else ()
    cubes = sorted(itertools.combinations_with_replacement(sides, 3), key=sum)
    # From the least compact one on: of two with as many chips the more compact one stays.
    found = {math.prod(shape): shape for shape in reversed((*SHAPES[chip.dims], *cubes))}
    return {size: found[size] for size in sorted(found) if size <= chip.largest}


def shape_of(name: str, devices: int, topology: str = '') -> tuple[int, ...]:
    """The shape of a TPU slice: that of a topology such as '4x8x8', else the most compact one."""
    chip = chips.CHIPS[name]
    valid = shapes(chip)
    if not topology and devices in valid:
        return valid[devices]
    near = sorted(valid, key=lambda size: abs(math.log(size / max(devices, 1))))[:4]
    slices = ', '.join(f'{size} ({_topology(valid[size])})' for size in sorted(near))
    if not topology:
        raise UserError(f'{devices} devices are no slice of {name}. The nearest are: {slices}.')
    try:
        shape = tuple(int(side) for side in topology.split('x'))
    except ValueError:
        shape = ()
    if len(shape) != chip.dims or math.prod(shape) != devices:
        raise UserError(
            f'--topology={topology} is no slice of {devices} {name} chips: expected '
            f'{chip.dims} numbers with x between them that multiply to --devices. '
            f'Slices: {slices}.'
        )
    return shape


def _topology(shape):
    """Its name, as in '4x8x8' for (4, 8, 8)."""
    return 'x'.join(map(str, shape))


def tpu_devices(name: str, shape: tuple[int, ...]) -> list[jax.Device]:
    """Devices of a TPU slice, which need not exist."""
    if importlib.util.find_spec('libtpu') is None:
        raise UserError(
            "compiling for TPUs needs libtpu: pip install -e '.[plan]'. Or add "
            '--simulate: simulated devices of this host, a rougher estimate.'
        )
    for variable, value in {
        'TPU_SKIP_MDS_QUERY': '1',  # there is no metadata server to ask
        'TPU_LOG_DIR': 'disabled',
        'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # no device is opened, so several may plan at once
        'TPU_ACCELERATOR_TYPE': f'{name}-8',
        'TPU_WORKER_HOSTNAMES': 'localhost',
    }.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    options: dict[str, str | tuple[int, ...]] = {}
    if name == 'v4':
        options['chip_config_name'] = 'megacore'  # otherwise a device is one of a chip's two cores
    if math.prod(shape) == 1:
        options['chips_per_host_bounds'] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(
            platform='tpu', topology_name=f'{name}:{_topology(shape)}', **options
        ).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f'libtpu does not know {_topology(shape)} chips of {name}: {error}'
        ) from error


def simulated_devices(number: int) -> list[jax.Device]:
    """This many CPU devices; UserError for too many, or if JAX has started here with fewer."""
    if number > MOST:
        raise UserError(
            f'{number:,} devices cannot be simulated: expected at most {MOST:,}. '
            'Plan for that many, with the batch in proportion.'
        )
    with contextlib.suppress(RuntimeError):  # JAX has started: its devices may be enough
        jax.config.update('jax_num_cpu_devices', number)
    devices = jax.devices('cpu')
    if len(devices) < number:
        raise UserError(
            f'this process has {len(devices)} devices and {number} were asked for: '
            'plan in a process of its own.'
        )
    return devices[:number]
