"""Predicts the memory, communication and time of a run on devices that need not exist here.

    python -m vit_jax.plan --config=configs/vit.py:h14 --devices=256 [--chip=v5p] [--json]
        [--topology=4x8x8] [--simulate] [--no-search] [--config.FIELD=VALUE ...]

The training step is compiled ahead of time and nothing is allocated: for TPUs by their own compiler
(pip install -e '.[plan]'), for GPUs and with --simulate for simulated devices of this host. With
--json the last line of stdout is one JSON object. docs/scale.md says what each number means.
"""

import argparse
import json
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import cli, machine, terminal
from vit_jax.errors import UserError, check_at_least, check_choice
from vit_jax.objectives import teacher
from vit_jax.planning import report, targets
from vit_jax.planning.estimate import Target
from vit_jax.training import accumulation, chips, device_defaults, pretrained, resolve


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, even if the plan does not fit, or 1 after an error that the last line explains."""
    parser = cli.make_parser('plan', __doc__)
    parser.add_argument('--devices', type=int, required=True, help='jax devices: chips or GPUs')
    parser.add_argument('--chip', default='v5p', help=f'one of {", ".join(chips.CHIPS)}')
    parser.add_argument('--topology', default='', help='shape of the TPU slice; default: compact')
    parser.add_argument('--simulate', action='store_true', help='a TPU without its compiler')
    parser.add_argument(
        '--search',
        action=argparse.BooleanOptionalAction,
        default=True,
        help='look for the largest batch, or for what helps: takes minutes more',
    )
    parser.add_argument('--json', action='store_true')
    options, config = cli.parse_with_config(parser, argv)
    # The devices of this machine are left alone; a program from a cache could not be analysed.
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
    require_numbers(config)
    with machine.same_sigterm():  # reading weights starts JAX with as many devices as there are
        target = make_target(options)
    config = complete(config, target)
    target = target._replace(teacher=teacher.load(config))
    found = report.make(config, target, options.search)
    terminal.write(report.text(found))
    if options.json:
        terminal.write(json.dumps(found))


def require_numbers(config: ConfigDict) -> None:
    """Raises UserError unless the config states the numbers of the data."""
    for name in ('num_examples', 'num_classes'):
        if config.dataset[name] < 1:
            raise UserError(
                f'dataset.{name} is {config.dataset[name]}: a plan reads no data, so '
                f'add --config.dataset.{name}=NUMBER.'
            )


def complete(config: ConfigDict, target: Target) -> FrozenConfigDict:
    """The config of a run on the devices, with the numbers of the data that it states."""
    taken = pretrained.take_fields(config, None)[0] if config.pretrained else {}
    dataset = config.dataset
    config = resolve.with_data(
        resolve.checked(config, taken),
        dataset.num_examples,
        dataset.num_classes,
        dataset.multi_label,
    )
    return resolve.with_device_defaults(
        config, target.platform, target.devices[0], device_defaults.fastest_dtype(target.platform)
    )


def make_target(options: argparse.Namespace) -> Target:
    """The devices to compile for; raises UserError when there are none of that kind or number."""
    name, number = options.chip, options.devices
    check_choice('--chip', name, chips.CHIPS)
    check_at_least('--devices', number, 1)
    chip = chips.CHIPS[name]
    if options.topology and not chip.dims:
        raise UserError(f'--topology={options.topology}: only TPUs have one, not {name}.')
    if chip.dims:
        shape = targets.shape_of(name, number, options.topology)
    simulated = options.simulate or not chip.dims
    devices = targets.simulated_devices(number) if simulated else targets.tpu_devices(name, shape)
    memory = chip.memory or machine.available_memory() / number
    return Target(name, devices, simulated, accumulation.HEADROOM * memory)


if __name__ == '__main__':
    cli.leave(main())
