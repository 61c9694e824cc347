"""Predicts the memory, communication and time of a run on devices that need not exist here.

    python -m vit_jax.plan --config=configs/vit.py:h14 --devices=256 [--chip=v5p] [--json]
        [--topology=4x8x8] [--simulate] [--no_search] [--config.FIELD=VALUE ...]

The command compiles the training step ahead of time and allocates nothing. For TPUs it uses their
own compiler (pip install -e '.[plan]'); for GPUs, and with --simulate, it compiles for simulated
devices of this host. With --json the last line of stdout is one JSON object. docs/how-to/plan.md
explains the numbers.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import cli, machine, terminal
from vit_jax import config as config_lib
from vit_jax.errors import UserError, check_at_least, check_choice
from vit_jax.objectives import teacher
from vit_jax.planning import report, targets
from vit_jax.planning.estimate import Target
from vit_jax.training import accumulation, chips, device_defaults, pretrained, resolve


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, even if the plan does not fit, or 1 after an error that the last line explains."""
    options, config = cli.parse_with_config(_parser(), argv)
    jax.config.update('jax_platforms', 'cpu')  # does not occupy the devices of this machine
    jax.config.update('jax_enable_compilation_cache', False)  # cached programs have no analysis
    require_numbers(config)
    with machine.same_sigterm():  # before JAX starts, which fixes the number of devices
        target = make_target(options)
    config = complete(config, target)
    target = target._replace(teacher=teacher.load(config))
    plan = report.make(config, target, options.search)
    terminal.write(report.text(plan))
    if options.json:
        terminal.write(json.dumps(plan))


def _parser() -> cli.Parser:
    parser = cli.make_parser('plan', __doc__)
    parser.add_argument(
        '--devices', type=int, required=True, help='number of JAX devices: chips or GPUs'
    )
    parser.add_argument('--chip', default='v5p', help=f'one of {", ".join(chips.CHIPS)}')
    parser.add_argument(
        '--topology', default='', help='shape of the TPU slice; default: the most compact one'
    )
    parser.add_argument(
        '--simulate', action='store_true', help='simulate a TPU, without its compiler'
    )
    parser.add_argument(
        '--no_search',
        '--no-search',
        action='store_false',
        dest='search',
        help='skip the search for the largest batch, or for changes that help, which takes minutes',
    )
    parser.add_argument('--search', action='store_true', default=True, help=argparse.SUPPRESS)
    parser.add_argument(
        '--json', action='store_true', help='print one JSON object as the last line'
    )
    return parser


def require_numbers(config: ConfigDict) -> None:
    """Raises UserError unless the config states the numbers of the data."""
    for name in ('num_examples', 'num_classes'):
        if config.dataset[name] < 1:
            raise UserError(
                f'dataset.{name} is {config.dataset[name]}: expected a positive number, because '
                f'a plan reads no data. Add --config.dataset.{name}=NUMBER.',
                kind='missing',
                field=f'dataset.{name}',
                value=config.dataset[name],
            )


def complete(config: ConfigDict, target: Target) -> FrozenConfigDict:
    """Returns the complete config of a run on the devices, with its own numbers of the data."""
    fields_of_weights: dict[str, Any] = {}
    if config.pretrained:
        fields_of_weights, *_ = pretrained.take_fields(config, None)
    dataset = config.dataset
    config = resolve.with_data(
        config_lib.checked(config, fields_of_weights),
        dataset.num_examples,
        dataset.num_classes,
        dataset.multi_label,
    )
    return resolve.with_machine(
        config, target.platform, target.devices[0], device_defaults.fastest_dtype(target.platform)
    )


def make_target(options: argparse.Namespace) -> Target:
    """Returns the devices to compile for.

    Args:
      options: the options --chip, --devices, --topology and --simulate.

    Raises:
      UserError: there are no devices of this kind and number.
    """
    name = options.chip
    number = options.devices
    check_choice('--chip', name, chips.CHIPS)
    check_at_least('--devices', number, 1)
    chip = chips.CHIPS[name]
    is_tpu = chip.dims > 0
    if options.topology and not is_tpu:
        raise UserError(
            f'--topology is {options.topology}: only TPUs have a topology, not {name}.',
            kind='value',
            field='--topology',
            value=options.topology,
        )
    if is_tpu:
        shape = targets.shape_of(name, number, options.topology)
    is_simulated = options.simulate or not is_tpu
    if is_simulated:
        devices = targets.simulated_devices(number)
    else:
        devices = targets.tpu_devices(name, shape)
    memory = chip.memory or machine.available_memory() / number
    return Target(name, devices, is_simulated, accumulation.HEADROOM * memory)


if __name__ == '__main__':
    cli.leave(main())
