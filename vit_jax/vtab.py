r"""Fine-tunes weights on each task of VTAB-1k and scores them on its test split (arXiv 1910.04867).

    python -m vit_jax.vtab --config=configs/vtab.py:b16 --config.pretrained=WEIGHTS --workdir=DIR \
        [--tasks=dtd,svhn] [--config.dataset.data_dir=TFDS_DIR] [--config.FIELD=VALUE ...]

Each task trains in DIR/TASK on its 1,000 examples, `dataset.final_split` of its recipe. It is
scored once, at its end, on `dataset.test_split`, by `best_metric` (default: accuracy). The command
leaves out tasks whose data set is not on this machine, and logs how to prepare it. If a task fails,
the others still train. The same command resumes where it was stopped, and adds the tasks whose data
are now present or fixed. At the end it logs a table of tasks and groups with their means, and
writes the scores to DIR/vtab.json; DIR/report.html compares all runs.
"""

import logging
from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax import cli, machine
from vit_jax import config as config_lib
from vit_jax.campaigns import vtab
from vit_jax.errors import UserError, check_choice
from vit_jax.processes import launch
from vit_jax.training import device_defaults

log = logging.getLogger(__name__)


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 on success, 143 or 130 after a signal, 1 after an error that the log explains."""
    parser = cli.make_parser('vtab', __doc__)
    parser.add_argument('--workdir', required=True, help='directory for the workdirs of all tasks')
    parser.add_argument(
        '--tasks', help='names of some tasks, with commas between them; default: all tasks'
    )
    cli.add_process_options(parser)
    options, overrides = cli.parse_options(parser, argv)
    launch.refuse_several('vit_jax.vtab', options.num_processes)
    groups, configs = read_tasks(options.config, overrides, options.tasks)
    machine.start_backend(device_defaults.host_devices(vtab.workdirs(configs, options.workdir)))
    code = vtab.run(groups, configs, options.workdir)
    if code:
        log.warning('The tasks stop here. Run the same command again to resume.')
    return code


def read_tasks(
    file: str | None, overrides: Sequence[str], only: str | None = None
) -> tuple[dict[str, str], dict[str, ConfigDict]]:
    """Reads the tasks of a config file.

    Args:
      file: FILE:MODEL of --config.
      overrides: options --config.FIELD=VALUE.
      only: names of tasks, with commas between them; None: all tasks.

    Returns:
      The group and the checked config of every task, by its name.

    Raises:
      UserError: if the config file has no tasks, or a config is impossible.
    """
    path, _, model = (file or '').partition(':')
    groups = cli.from_config_file(file, 'get_tasks')
    if groups is None:
        raise UserError(
            f'{path} has no tasks (a function get_tasks): expected --config=configs/vtab.py:MODEL.',
            kind='content',
            field='--config',
            file=path,
        )
    if ',' in model:
        raise UserError(
            f'--config={file} names more than a model: expected '
            f'--config={path}:MODEL, and --tasks=TASK,... for some of its tasks.',
            kind='value',
            field='--config',
            value=file,
        )
    names = list(groups)
    if only:
        names = [name.strip() for name in only.split(',')]
    for name in names:
        check_choice('--tasks', name, groups)
    configs = {}
    for name in names:
        config = cli.read_config_file(f'{path}:{model},{name}')
        configs[name] = cli.override(config, overrides, ['--workdir', '--tasks'])
    for config in configs.values():  # now, not after hours of training
        config_lib.checked(config)
    return {name: groups[name] for name in names}, configs


if __name__ == '__main__':
    cli.leave(main())
