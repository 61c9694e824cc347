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
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import cli, machine, reporting
from vit_jax import config as config_lib
from vit_jax.errors import DivergedError, MissingDataError, UserError, check_choice
from vit_jax.files import write_json
from vit_jax.processes import launch
from vit_jax.training import device_defaults
from vit_jax.workdir import log_file, metrics, record

log = logging.getLogger('vit_jax.vtab')


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
    machine.check_backend(
        device_defaults.host_devices(
            {os.path.join(options.workdir, task): config for task, config in configs.items()}
        )
    )
    code = run(groups, configs, options.workdir)
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


def run(groups: Mapping[str, str], configs: Mapping[str, ConfigDict], directory: str) -> int:
    """Trains and scores every task; returns 0, or what loop.train returns after a signal.

    Args:
      groups, configs: by task, see `read_tasks`.

    Raises UserError at the end if tasks ended with one, which the log then has.
    """
    missing = missing_data(configs)
    if len(missing) < len(configs):
        record.require_no_run(directory)
        log_file.log_to(directory)  # first, so that train.log names the tasks that are left out
    for problem in dict.fromkeys(missing.values()):  # some tasks share a data set
        log.warning(
            'left out: %s: %s',
            ', '.join(task for task in missing if missing[task] == problem),
            problem,
        )
    if len(missing) == len(configs):
        raise UserError(
            'the data of none of the tasks are on this machine: prepare some as said '
            'above, or name where they are by --config.dataset.data_dir=DIRECTORY.'
        )
    code, scores, failed = _train(
        {task: config for task, config in configs.items() if task not in missing}, directory
    )
    if code:
        return code
    if scores:  # else what others have written stays
        _conclude(groups, configs, directory, scores, failed)
    if failed:
        raise UserError(
            f'{len(failed)} of {len(configs)} tasks failed, as said above: '
            f'{", ".join(failed)}. Mend that, and run the same command again: what is '
            'finished is not trained again.'
        )
    return 0


def _train(configs, directory):
    """What loop.train returns after a signal, else 0; accuracies by task; tasks that failed."""
    from vit_jax.training import loop  # imports TensorFlow

    scores, failed = {}, []
    for task, config in configs.items():
        folder = os.path.join(directory, task)
        log.info('task %s, in %s', task, folder)
        try:
            if code := loop.train(
                config_lib.final(config, config.dataset.final_split, config.seed), folder
            ):
                return code, scores, failed
            scores[task] = metrics.last_accuracy(folder)
        except DivergedError as error:
            log.warning('%s diverges and has no accuracy: %s', task, error)
            scores[task] = None
        except UserError as error:  # the data of the others may be whole
            log.error('task %s failed: %s', task, error)
            failed.append(task)
    return 0, scores, failed


def _conclude(groups, configs, directory, scores, failed):
    """The table, vtab.json and the page."""
    log.info(
        'accuracy on the test splits, after training on the final splits:\n%s',
        table(groups, scores, failed),
    )
    path = os.path.join(directory, 'vtab.json')
    write_json(path, as_json(groups, scores, failed))
    log.info('numbers: %s', path)
    if others := [
        name
        for name in sorted(os.listdir(directory))
        if name not in configs and os.path.isfile(os.path.join(directory, name, record.CONFIG))
    ]:
        log.warning(
            'not in these numbers: %s, also in %s. Name all by --tasks: what is finished '
            'is not trained again.',
            ', '.join(others),
            directory,
        )
    if next(iter(configs.values())).report:
        reporting.conclude_all(
            directory,
            {
                os.path.join(directory, task): groups[task]
                + (' · diverges' if score is None else '')
                for task, score in scores.items()
            },
        )


def missing_data(configs: Mapping[str, ConfigDict]) -> dict[str, str]:
    """By task, why its data cannot be opened where they are not on this machine.

    Raises UserError when they are and cannot be used, now and not after hours of training.
    """
    from vit_jax.data.sources import open_split

    missing = {}
    for task, config in configs.items():
        dataset = config.dataset
        try:
            for split in (dataset.final_split, dataset.test_split):
                source = open_split(dataset, split)
                if (classes := len(source.class_names)) != (dataset.num_classes or classes):
                    raise UserError(
                        f"'{dataset.name}' has {classes} classes, and the recipe "
                        f'{dataset.num_classes}: prepare the set again.'
                    )
        except MissingDataError as error:
            missing[task] = str(error)
        except UserError as error:
            raise UserError(f'the task {task}: {error}') from error
    return missing


def means(
    groups: Mapping[str, str], scores: Mapping[str, float | None]
) -> dict[str, tuple[float | None, int, int]]:
    """By group, and 'all': mean of the accuracies, of how many, and how many tasks there are."""
    found = {}
    for group in [*dict.fromkeys(groups.values()), 'all']:
        tasks = [task for task in groups if group in (groups[task], 'all')]
        values = [scores[task] for task in tasks if scores.get(task) is not None]
        found[group] = statistics.mean(values) if values else None, len(values), len(tasks)
    return found


def table(
    groups: Mapping[str, str], scores: Mapping[str, float | None], failed: Collection[str] = ()
) -> str:
    """A line for each task, below its group, and the means; says what is missing.

    `scores` are accuracies in [0, 1], None where training diverges; missing tasks and those that
    have `failed` are not in it.
    """
    found = {
        task: 'failed'
        if task in failed
        else 'no data'
        if task not in scores
        else _percent(scores[task], 'diverges')
        for task in groups
    }
    lines = []
    for group, (mean, count, total) in means(groups, scores).items():
        said = '' if count == total else f', of {count} of {total} tasks'
        lines.append(f'  {f"{group}, mean{said}":<42}{_percent(mean, "-")}')
        lines += [f'    {task:<40}{found[task]}' for task in groups if groups[task] == group]
    return '\n'.join(lines)


def _percent(accuracy, otherwise):
    return otherwise if accuracy is None else f'{100 * accuracy:.2f} %'


def as_json(
    groups: Mapping[str, str], scores: Mapping[str, float | None], failed: Collection[str] = ()
) -> dict[str, Any]:
    """The content of vtab.json, of what `table` has; accuracies in [0, 1]."""
    return {
        'tasks': {
            task: {'group': groups[task], 'test_accuracy': accuracy}
            for task, accuracy in scores.items()
        },
        'failed': list(failed),
        'missing': [task for task in groups if task not in scores and task not in failed],
        'means': {
            group: {'test_accuracy': mean, 'tasks': count, 'of': total}
            for group, (mean, count, total) in means(groups, scores).items()
        },
    }


if __name__ == '__main__':
    cli.leave(main())
