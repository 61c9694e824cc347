"""The tasks of VTAB-1k: trains each on its 1,000 examples and scores it on its test split."""

import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import reporting
from vit_jax.campaigns.outcome import percent
from vit_jax.errors import DivergedError, MissingDataError, UserError
from vit_jax.files import write_json
from vit_jax.workdir import log_file, metrics, record

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What the tasks have reached. A task whose data are missing is in `groups` alone."""

    groups: Mapping[str, str]  # of all tasks
    scores: Mapping[str, float | None]  # accuracy in [0, 1]; None where training diverges
    failed: Sequence[str] = ()  # tasks that ended with an error


class Mean(NamedTuple):
    """The mean accuracy of a group of tasks."""

    accuracy: float | None  # in [0, 1]; None without any score
    scored: int  # tasks that have a score
    total: int  # tasks of the group


def workdirs(configs: Mapping[str, ConfigDict], directory: str) -> dict[str, ConfigDict]:
    """The config of every task, by the workdir in which the task trains."""
    return {os.path.join(directory, task): config for task, config in configs.items()}


def run(groups: Mapping[str, str], configs: Mapping[str, ConfigDict], directory: str) -> int:
    """Trains and scores every task, or continues where that was stopped.

    Args:
      groups: the group of every task.
      configs: the config of every task.
      directory: for the workdirs of all tasks.

    Returns:
      0, or what loop.train returns after a signal, which ends all tasks.

    Raises:
      UserError: if the data of no task are there; at the end, if a task failed.
    """
    problems = missing_data(configs)
    present = {task: config for task, config in configs.items() if task not in problems}
    if present:
        record.require_no_run(directory)
        log_file.log_to(directory)  # first, so that train.log names the tasks that are left out
    for problem in dict.fromkeys(problems.values()):  # some tasks share a data set
        tasks = [task for task in problems if problems[task] == problem]
        log.warning('left out: %s: %s', ', '.join(tasks), problem)
    if not present:
        raise UserError(
            'the data of none of the tasks are on this machine: prepare some as said '
            'above, or name where they are by --config.dataset.data_dir=DIRECTORY.'
        )
    code, scores, failed = _train(present, directory)
    if code:
        return code
    if scores:  # else what others have written stays
        outcome = Outcome(groups, scores, failed)
        report(outcome, directory)
        _warn_of_other_tasks(configs, directory)
        if next(iter(configs.values())).report:
            reporting.conclude_all(directory, notes(outcome, directory))
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

    scores = {}
    failed = []
    for task, config in configs.items():
        folder = os.path.join(directory, task)
        log.info('task %s, in %s', task, folder)
        final = config_lib.final(config, config.dataset.final_split, config.seed)
        try:
            code = loop.train(final, folder)
            if code:
                return code, scores, failed
            scores[task] = metrics.last_accuracy(folder)
        except DivergedError as error:
            log.warning('%s diverges and has no accuracy: %s', task, error)
            scores[task] = None
        except UserError as error:  # the data of the others may be whole
            log.error('task %s failed: %s', task, error)
            failed.append(task)
    return 0, scores, failed


def _warn_of_other_tasks(configs, directory):
    """Warns of runs in the directory whose tasks were not asked for."""
    others = [
        name
        for name in sorted(os.listdir(directory))
        if name not in configs and os.path.isfile(os.path.join(directory, name, record.CONFIG))
    ]
    if others:
        log.warning(
            'not in these numbers: %s, also in %s. Name all by --tasks: what is finished '
            'is not trained again.',
            ', '.join(others),
            directory,
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
                classes = len(open_split(dataset, split).class_names)
                if dataset.num_classes not in (0, classes):
                    raise UserError(
                        f"'{dataset.name}' has {classes} classes, and the recipe "
                        f'{dataset.num_classes}: prepare the set again.'
                    )
        except MissingDataError as error:
            missing[task] = str(error)
        except UserError as error:
            raise UserError(f'the task {task}: {error}') from error
    return missing


def report(outcome: Outcome, directory: str) -> None:
    """Logs the outcome and writes it to vtab.json in the directory."""
    log.info('accuracy on the test splits, after training on the final splits:\n%s', table(outcome))
    path = os.path.join(directory, 'vtab.json')
    write_json(path, as_json(outcome))
    log.info('numbers: %s', path)


def means(outcome: Outcome) -> dict[str, Mean]:
    """The mean of every group, and that of 'all' tasks."""
    groups, scores, _ = outcome
    by_group = {}
    for group in [*dict.fromkeys(groups.values()), 'all']:
        tasks = [task for task in groups if group in (groups[task], 'all')]
        values = [score for task in tasks if (score := scores.get(task)) is not None]
        mean = statistics.mean(values) if values else None
        by_group[group] = Mean(mean, len(values), len(tasks))
    return by_group


def table(outcome: Outcome) -> str:
    """A line for each task, below its group, and the means; says what is missing."""
    lines = []
    for group, mean in means(outcome).items():
        share = '' if mean.scored == mean.total else f', of {mean.scored} of {mean.total} tasks'
        label = f'{group}, mean{share}'
        lines.append(f'  {label:<42}{percent(mean.accuracy, "-")}')
        for task in outcome.groups:
            if outcome.groups[task] == group:
                lines.append(f'    {task:<40}{_result(outcome, task)}')
    return '\n'.join(lines)


def _result(outcome, task):
    """What the table says of a task."""
    if task in outcome.failed:
        return 'failed'
    if task not in outcome.scores:
        return 'no data'
    return percent(outcome.scores[task], 'diverges')


def notes(outcome: Outcome, directory: str) -> dict[str, str]:
    """What is to be said of each run beside the others, by workdir: the group of its task."""
    result = {}
    for task, score in outcome.scores.items():
        diverges = ' · diverges' if score is None else ''
        result[os.path.join(directory, task)] = outcome.groups[task] + diverges
    return result


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The content of vtab.json; accuracies in [0, 1]."""
    groups, scores, failed = outcome
    return {
        'tasks': {
            task: {'group': groups[task], 'test_accuracy': accuracy}
            for task, accuracy in scores.items()
        },
        'failed': list(failed),
        'missing': [task for task in groups if task not in scores and task not in failed],
        'means': {
            group: {'test_accuracy': mean.accuracy, 'tasks': mean.scored, 'of': mean.total}
            for group, mean in means(outcome).items()
        },
    }
