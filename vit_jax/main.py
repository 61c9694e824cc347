"""Trains a model.

python -m vit_jax.main --config=configs/vit.py:b16 [--workdir=DIR] [--config.FIELD=VALUE ...]
"""

import contextlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ml_collections import ConfigDict

from vit_jax import cli, machine, reporting, terminal
from vit_jax import config as config_lib
from vit_jax.errors import MissingDataError, UserError
from vit_jax.processes import launch
from vit_jax.workdir import record, run_directory

# Batch size and number of steps of a run on a directory with any number of images.
_OWN_BATCH = 16
_OWN_STEPS = 1000


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    The exit code is 0 when the run is complete, 143 or 130 after a signal, and 1 after an error,
    which the last line explains.
    """
    parser = cli.make_parser('main', __doc__, config_lib.help_text)
    parser.add_argument(
        '--workdir',
        help='directory for checkpoints, metrics and curves; a run in it resumes. The default is '
        'runs/NAME, with NAME from --config, as in runs/vit-b16',
    )
    parser.add_argument(
        '--verbose',
        action='store_true',
        help='show every line of train.log: all parameters, and also training rows on a terminal',
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
    # These import TensorFlow, which takes seconds and which --help does not need.
    from vit_jax.training import device_defaults, loop

    # One of several processes starts JAX in join_processes, before it can count them.
    machine.use_cpu_as(config.mesh.host_devices)
    cli.join_processes(
        options, continues=True, host_devices=device_defaults.host_devices({workdir: config})
    )
    with run_directory.removed_if_refused(workdir):
        try:
            code = loop.train(config, workdir, log_to_file=True)
        except MissingDataError as error:
            raise MissingDataError(
                f'{error}{other_data(argv, config)}',
                field=error.field,
                file=error.file,
                value=error.value,
            ) from error
    if config.report:
        # Also for a stopped run: the report of the resumed run compares it with the recipe.
        reporting.record_recipe(workdir, recipe)
        if code == 0:
            reporting.conclude(workdir)
    launch.finish()
    return code


def other_data(argv: Sequence[str] | None, config: ConfigDict) -> str:
    """Advice if the data set of a recipe is missing; '' if the command line names the data set.

    The advice has a command that trains the recipe's model on a directory with any number of
    images.

    Args:
      argv: arguments of the command; None for the arguments of the process.
      config: the config of the command.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    names = [argument.partition('=')[0] for argument in arguments]
    if '--config.dataset.name' in names:
        return ''
    changes = for_a_directory(config)
    kept = [
        argument
        for argument, name in zip(arguments, names, strict=True)
        if name.removeprefix('--config.') not in changes
    ]
    options = [f'--config.{field}={value}' for field, value in changes.items()]
    command = shlex.join(['python', '-m', 'vit_jax.main', *kept, *options])
    return (
        '\nA run without data of your own, in minutes on a laptop:\n  make quickstart\n'
        'Images of your own, DATA/CLASS/*.jpg or DATA/{train,val}/CLASS/*.jpg:\n  '
        f'{command}\n'
        'Few images? Released weights reach a higher accuracy: see docs/tutorials/fine-tune.md.'
    )


def for_a_directory(config: ConfigDict) -> dict[str, Any]:
    """The fields of a recipe that need other values for a directory DATA with few images.

    The batch is small enough for small directories, and the learning rate follows its square root.
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
    """The recipe of a run: `file`, the value of --config, and `config`, its fields by dotted name.

    The fields do not include changes by the command line.
    """
    config = config_lib.with_values_read(cli.read_config_file(file))
    with contextlib.suppress(UserError):  # the config may be incomplete without the command line
        config = config_lib.checked(config)
    return {'file': file, 'config': config_lib.flatten(config)}


def run() -> NoReturn:
    """Runs the command `vit-jax`."""
    cli.leave(main())


if __name__ == '__main__':
    run()
