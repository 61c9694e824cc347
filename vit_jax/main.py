"""Trains a model.

python -m vit_jax.main --config=configs/vit.py:b16 [--workdir=DIR] [--config.FIELD=VALUE ...]
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from vit_jax import cli, machine, reporting, terminal
from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.processes import launch
from vit_jax.workdir import record


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
    workdir = cli.default_workdir(argv) if options.workdir is None else options.workdir
    recipe = recipe_of(argv)
    record.require_apart(workdir, config.dataset)
    from vit_jax.training import chosen, loop  # imports TensorFlow, for which --help need not wait

    machine.use_cpu_as(config.mesh.host_devices)  # each of several, which start JAX as they join
    cli.join_processes(options, continues=True, host_devices=chosen.host_devices({workdir: config}))
    code = loop.train(config, workdir, log_to_file=True)
    if config.report:
        reporting.record_recipe(workdir, recipe)  # also of a stopped run, whose page comes later
        if not code:
            reporting.conclude(workdir)
    launch.finish()
    return code


def recipe_of(argv: Sequence[str] | None) -> dict[str, Any]:
    """What a run departs from: `file`, that of --config, and its fields without those overridden.

    They are `config`, by dotted name.
    """
    file, _ = cli.config_file(argv)
    config = cli.read_config([f'--config={file}'])
    with contextlib.suppress(UserError):  # it may need what the command line adds
        config = config_lib.checked(config)
    return {'file': file, 'config': config_lib.flatten(config)}


if __name__ == '__main__':
    cli.leave(main())
