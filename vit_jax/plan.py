"""What a run will need: memory, communication and time on devices that need not be there.

    python -m vit_jax.plan --config=configs/vit.py:h14 --devices=256 [--chip=v5p] [--json]
        [--topology=4x8x8] [--simulate] [--no-search] [--config.FIELD=VALUE ...]

The training step is compiled ahead of time and nothing is allocated: for TPUs by their own compiler
(pip install -e '.[plan]'), for GPUs and with --simulate for simulated devices of this host. With
--json the last line of stdout is one JSON object. docs/scale.md says what each number means.
"""

import argparse
import json
import sys
from unittest import mock

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.main import describe, refuse_repeated
from vit_jax.planning import report, targets
from vit_jax.planning.estimate import Target
from vit_jax.training import accumulation, chips, pretrained, sharding
from vit_jax.workdir import logs


def main(argv: list[str] | None = None) -> int:
    """Returns 0, also when the plan does not fit, or 1 after an error that the last line explains.
    """
    options, rest = parse(sys.argv[1:] if argv is None else argv)
    logs.to_terminal()
    # Whatever this machine has is left alone, and a program from a cache would not be described.
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)
    try:
        config = read_config(rest)
        chips.get(options.chip)
        config = settle(config)
        target = make_target(options)
        check_mesh(config, target)
        plan = report.make(config, target, options.search)
    except UserError as error:
        logs.LOGGER.error('error: %s', error)
        return 1
    print(report.text(plan))
    if options.json:
        print(json.dumps(plan))
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's own options, and the arguments that are about the config."""
    parser = argparse.ArgumentParser('vit_jax.plan', description=__doc__, allow_abbrev=False,
                                     usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--devices', type=int, required=True, help='jax devices: chips or GPUs')
    parser.add_argument('--chip', default='v5p', help=f'one of {", ".join(chips.CHIPS)}')
    parser.add_argument('--topology', default='', help='shape of the TPU slice; default: compact')
    parser.add_argument('--simulate', action='store_true', help='a TPU without its compiler')
    parser.add_argument('--search', action=argparse.BooleanOptionalAction, default=True,
                        help='look for the largest batch, or for what helps: minutes more')
    parser.add_argument('--json', action='store_true')
    return parser.parse_known_args(argv)


def read_config(arguments: list[str]) -> ConfigDict:
    """The config of --config=FILE:ARGUMENT --config.FIELD=VALUE...

    Raises:
      UserError: there is none, or no such field, or a tuple is given twice.
    """
    values = flags.FlagValues()
    flag = config_flags.DEFINE_config_file('config', None, flag_values=values)
    argv = ['vit_jax.plan', *arguments]
    try:
        with mock.patch.object(sys, 'argv', argv):  # where ml_collections looks for fields
            unknown = values(argv)[1:]
        if unknown or flag.value is None:
            raise UserError(f'unexpected argument {unknown[0]!r}; flags are written --name=value.'
                            if unknown else 'add --config=FILE, as in configs/vit.py:h14')
        _ = flag.value.seed  # a missing file shows when a field is first used
        refuse_repeated(argv, values)
        return flag.value
    except OSError as error:
        raise UserError(f'no config file. {error}') from error
    except (AttributeError, KeyError, TypeError, ValueError, flags.Error) as error:
        raise UserError(describe(error)) from error


def settle(config: ConfigDict) -> ConfigDict:
    """The config as training would settle it, from the numbers of the data that stand in it.

    Raises:
      UserError: they do not.
    """
    for name in ('num_examples', 'num_classes'):
        if config.dataset[name] < 1:
            raise UserError(f'dataset.{name} is {config.dataset[name]}: a plan reads no data, so '
                            f'add --config.dataset.{name}=NUMBER.')
    if config.pretrained:
        config, _ = pretrained.take_fields(config, '')
    return config_lib.settle(config, config.dataset.num_examples, config.dataset.num_classes)


def make_target(options: argparse.Namespace) -> Target:
    """The devices to compile for; raises UserError when there are none such."""
    name, number = options.chip, options.devices
    chip = chips.CHIPS[name]
    if number < 1:
        raise UserError(f'--devices is {number}: expected at least 1.')
    if options.topology and not chip.dims:
        raise UserError(f'--topology={options.topology}: only TPUs have one, not {name}.')
    if chip.dims:
        shape = targets.shape_of(name, number, options.topology)
    simulated = options.simulate or not chip.dims
    devices = (targets.simulated_devices(number) if simulated else
               targets.tpu_devices(name, shape))
    memory = chip.memory or accumulation.memory_limit() / number
    return Target(name, devices, simulated, accumulation.HEADROOM * memory)


def check_mesh(config: ConfigDict, target: Target) -> None:
    """Raises UserError when the mesh, the batch, the model or the hosts do not fit the devices."""
    mesh = sharding.make_mesh(config.mesh, target.devices)
    sharding.data_share(mesh, target.devices[0].process_index)
    sharding.check_batch(config.batch_size, config.accum_steps, mesh)
    sharding.check_model(config.model, mesh)


if __name__ == '__main__':
    sys.exit(main())
