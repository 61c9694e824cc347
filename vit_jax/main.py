"""Trains a model.

python -m vit_jax.main --config=configs/vit.py:b16 [--workdir=DIR] [--config.FIELD=VALUE ...]
"""

import contextlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import cli, machine, reporting, terminal
from vit_jax import config as config_lib
from vit_jax.errors import MissingDataError, UserError
from vit_jax.processes import launch
from vit_jax.workdir import record, run_directory

# Of a run on a directory of images of any number.
_OWN_BATCH, _OWN_STEPS = 16, 1000


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when done, 143 or 130 after a signal, 1 after an error; the last line says why."""
    parser = cli.make_parser('main', __doc__, config_lib.help_text)
    parser.add_argument(
        '--workdir',
        help='for checkpoints, metrics and curves; a run that is '
        'found there continues. Without it runs/NAME, where NAME is made of '
        '--config, as in runs/vit-b16',
    )
    parser.add_argument(
        '--verbose',
        action='store_true',
        help='show every line of train.log: all parameters, and on a terminal training rows, too',
    )
    cli.add_process_options(parser)
    options, config = cli.parse_with_config(parser, argv)
    if options.verbose:
        terminal.show_details()
    workdir = options.workdir
    if workdir is None:
        workdir = cli.default_workdir(options.config)
    recipe = recipe_of(options.config)
    record.require_apart(workdir, config.dataset)
    from vit_jax.training import (  # imports TensorFlow, for which --help need not wait
        device_defaults,
        loop,
    )

    machine.use_cpu_as(config.mesh.host_devices)  # each of several, which start JAX as they join
    cli.join_processes(
        options, continues=True, host_devices=device_defaults.host_devices({workdir: config})
    )
    with run_directory.removed_if_refused(workdir):
        try:
            code = loop.train(config, workdir, log_to_file=True)
        except MissingDataError as error:
            raise MissingDataError(f'{error}{other_data(argv, config)}') from error
    if config.report:
        reporting.record_recipe(workdir, recipe)  # also of a stopped run, whose page comes later
        if not code:
            reporting.conclude(workdir)
    launch.finish()
    return code


def other_data(argv: Sequence[str] | None, config: ConfigDict) -> str:
    """What to run instead of a recipe whose data set is not there; '' if the user named the data.

    The command trains the recipe's model on a directory of any size.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    given = [argument.partition('=')[0] for argument in arguments]
    if '--config.dataset.name' in given:
        return ''
    changes = for_a_directory(config)
    kept = [
        argument
        for argument, name in zip(arguments, given, strict=True)
        if name.removeprefix('--config.') not in changes
    ]
    command = shlex.join(
        ['python', '-m', 'vit_jax.main', *kept]
        + [f'--config.{field}={value}' for field, value in changes.items()]
    )
    return (
        '\nA run that needs no data of yours, in minutes on a laptop:\n  make quickstart\n'
        'Images of your own, DATA/CLASS/*.jpg or DATA/{train,val}/CLASS/*.jpg:\n  '
        f'{command}\n'
        'Few images? Released weights get further: README shows how to fine-tune them.'
    )


def for_a_directory(config: ConfigDict) -> dict[str, Any]:
    """The fields of a recipe that have other values for a directory DATA of some images.

    The batch has the size that small folders allow, and the learning rate follows its square root.
    """
    changes = {'dataset.name': 'DATA'}
    fields = config_lib.flatten(config)
    neutral = {
        'dataset.train_split': 'train',
        'dataset.eval_split': '',
        'dataset.num_examples': 0,
        'dataset.num_classes': 0,
        'dataset.label': '',
        'dataset.subset': '',
        'num_epochs': 0,
        'num_steps': _OWN_STEPS,
        'optimizer.warmup_steps': _OWN_STEPS // 10,
        'optimizer.cooldown_steps': 0,
        'evals.fewshot.shots': [],
        'accum_steps': min(config.accum_steps, 1),
        'batch_size': min(config.batch_size, _OWN_BATCH),
    }
    if config.batch_size > _OWN_BATCH:
        rate = config.optimizer.learning_rate * (_OWN_BATCH / config.batch_size) ** 0.5
        neutral['optimizer.learning_rate'] = float(f'{rate:.1g}')
    for field, value in neutral.items():
        if fields[field] != value:
            changes[field] = '' if value == [] else value
    return changes


def recipe_of(file: str) -> dict[str, Any]:
    """What a run departs from: `file`, that of --config, and its fields without those overridden.

    They are `config`, by dotted name.
    """
    config = config_lib.with_values_read(cli.read_config_file(file))
    with contextlib.suppress(UserError):  # it may need what the command line adds
        config = config_lib.checked(config)
    return {'file': file, 'config': config_lib.flatten(config)}


if __name__ == '__main__':
    cli.leave(main())
