r"""Fine-tunes weights on each task of VTAB-1k and scores them on its test split (arXiv 1910.04867).

    python -m vit_jax.vtab --config=configs/vtab.py:b16 --config.pretrained=WEIGHTS --workdir=DIR \
        [--tasks=dtd,svhn] [--config.dataset.data_dir=TFDS_DIR] [--config.FIELD=VALUE ...]

Each task trains in DIR/TASK on its 1,000 examples, `dataset.final_split` of its recipe, and is
scored once, at its end, on `dataset.test_split`. Tasks whose data set is not on this machine are
left out, and named with what prepares it; where one fails, the others go on. The same command
continues where it was stopped, and does those whose data have come or were mended. At the end the
log has a table of tasks and groups, with means, and DIR/vtab.json the numbers; DIR/report.html
shows all runs side by side.
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
    """Returns 0, 143 or 130 after a signal, 1 after an error that the last line explains."""
    parser = cli.make_parser('vtab', __doc__)
    parser.add_argument('--workdir', required=True, help='for the workdirs of all tasks')
    parser.add_argument('--tasks', help='some of them, with commas between; default: all')
    cli.add_process_options(parser)
    options, others = parser.parse_known_args(argv)
    launch.refuse_several('vit_jax.vtab', options.num_processes)
    groups, configs = read_tasks(others, options.tasks)
    machine.start_backend(device_defaults.host_devices(vtab.workdirs(configs, options.workdir)))
    code = vtab.run(groups, configs, options.workdir)
    if code:
        log.warning('the tasks stop here. To continue, run the same command again.')
    return code


def read_tasks(
    arguments: Sequence[str], only: str | None = None
) -> tuple[dict[str, str], dict[str, ConfigDict]]:
    """The group and the config of every task, or of those in the text `only`.

    Raises UserError when the config file has no tasks, or a config is not possible.
    """
    file, others = cli.config_file(arguments)
    path, _, argument = (file or '').partition(':')
    groups = cli.from_config_file(file, 'get_tasks')
    if groups is None:
        raise UserError(
            f'{path} has no tasks (a function get_tasks): expected --config=configs/vtab.py:MODEL.'
        )
    if ',' in argument:
        raise UserError(
            f'--config={file} names more than a model: expected '
            f'--config={path}:MODEL, and --tasks=TASK,... for some of its tasks.'
        )
    names = [name.strip() for name in only.split(',')] if only else list(groups)
    for name in names:
        check_choice('--tasks', name, groups)
    configs = {
        name: cli.read_config(
            [f'--config={path}:{argument},{name}', *others], ['--workdir', '--tasks']
        )
        for name in names
    }
    for config in configs.values():  # now, and not after hours of training
        config_lib.checked(config)
    return {name: groups[name] for name in names}, configs


if __name__ == '__main__':
    cli.leave(main())
