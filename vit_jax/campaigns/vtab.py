"""The tasks of VTAB-1k: trains each on its 1,000 examples and scores it on its test split."""

import logging
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import reporting
from vit_jax.campaigns import scores as scores_lib
from vit_jax.campaigns.scores import ACCURACY, Ranking
from vit_jax.errors import DivergedError, MissingDataError, UserError
from vit_jax.files import write_json
from vit_jax.workdir import log_file, record

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """The scores of the tasks. A task without data is only in `groups`."""

    groups: Mapping[str, str]  # the groups of all tasks
    scores: Mapping[str, float | None]  # value of the metric; None if training diverges
    failed: Sequence[str] = ()  # tasks that ended with an error
    ranking: Ranking = ACCURACY


class Mean(NamedTuple):
    """The mean score of a group of tasks."""

    score: float | None  # None without any score
    scored: int  # number of tasks that have a score
    total: int  # number of tasks in the group


def workdirs(configs: Mapping[str, ConfigDict], directory: str) -> dict[str, ConfigDict]:
    """Returns the config of every task, by the workdir of the task."""
    return {os.path.join(directory, task): config for task, config in configs.items()}


def run(groups: Mapping[str, str], configs: Mapping[str, ConfigDict], directory: str) -> int:
    """Trains and scores every task, or resumes.

    Args:
      groups: the group of every task.
      configs: the config of every task.
      directory: the directory for the workdirs of all tasks.

    Returns:
      0, or the exit code of loop.train after a signal, which stops all tasks.

    Raises:
      UserError: if the data of every task are missing; at the end, if a task failed.
    """
    problems = missing_data(configs)
    present = {task: config for task, config in configs.items() if task not in problems}
    if present:
        record.require_no_run(directory)
        log_file.log_to(directory)  # before the next lines, which train.log then has as well
    for problem in dict.fromkeys(problems.values()):  # tasks may share a data set
        tasks = [task for task in problems if problems[task] == problem]
        log.warning('Left out %s: %s', ', '.join(tasks), problem)
    if not present:
        raise UserError(
            'the data of all tasks are missing on this machine: prepare some as described '
            'above, or give their location with --config.dataset.data_dir=DIRECTORY.',
            kind='missing_data',
            field='dataset.data_dir',
        )
    code, scores, failed = _train(present, directory)
    if code:
        return code
    if scores:  # without scores the files of an earlier call stay
        _conclude(groups, configs, scores, failed, directory)
    if failed:
        raise UserError(
            f'{len(failed)} of {len(configs)} tasks failed, for the reasons above: '
            f'{", ".join(failed)}. Fix these, and run the same command again: it does not '
            'train finished tasks again.',
            kind='other',
        )
    return 0


def _train(configs, directory):
    """Trains the tasks; returns (exit code, scores by task, tasks that failed)."""
    from vit_jax.training import loop  # imports TensorFlow

    scores = {}
    failed = []
    for task, config in configs.items():
        workdir = os.path.join(directory, task)
        log.info('Training the task %s in %s', task, workdir)
        final = config_lib.final(config, config.dataset.final_split, config.seed)
        try:
            code = loop.train(final, workdir)
            if code:
                return code, scores, failed
            scores[task] = scores_lib.last_score(workdir, config.best_metric)
        except DivergedError as error:
            log.warning('%s diverges and has no score: %s', task, error)
            scores[task] = None
        except UserError as error:  # the data of the other tasks may be intact
            log.error('task %s failed: %s', task, error)
            failed.append(task)
    return 0, scores, failed


def _conclude(groups, configs, scores, failed, directory):
    """Logs the outcome, and writes it with the page that compares the runs."""
    ranking = ACCURACY
    for task, score in scores.items():
        if score is not None:
            ranking = scores_lib.ranking(os.path.join(directory, task), configs[task])
            break
    outcome = Outcome(groups, scores, failed, ranking)
    report(outcome, directory)
    _warn_of_other_tasks(configs, directory)
    if next(iter(configs.values())).report:
        reporting.conclude_all(directory, notes(outcome, directory))


def _warn_of_other_tasks(configs, directory):
    """Warns of runs in the directory whose tasks the command does not name."""
    others = [
        name
        for name in sorted(os.listdir(directory))
        if name not in configs and os.path.isfile(os.path.join(directory, name, record.CONFIG))
    ]
    if others:
        log.warning(
            'These numbers leave out %s, also in %s. Name all tasks with --tasks: the command '
            'does not train finished tasks again.',
            ', '.join(others),
            directory,
        )


def missing_data(configs: Mapping[str, ConfigDict]) -> dict[str, str]:
    """Returns the reason why data cannot be opened, for each task without data on this machine.

    Raises:
      UserError: if data exist but cannot be used. The check comes before hours of training.
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
                        f'{dataset.num_classes}: prepare the set again.',
                        kind='content',
                        field='dataset.num_classes',
                        value=dataset.num_classes,
                    )
        except MissingDataError as error:
            missing[task] = str(error)
        except UserError as error:
            raise UserError(
                f'the task {task}: {error}',
                kind=error.kind,
                field=error.field,
                file=error.file,
                value=error.value,
            ) from error
    return missing


def report(outcome: Outcome, directory: str) -> None:
    """Logs the outcome and writes it to vtab.json in the directory."""
    log.info(
        '%s on the test splits, after training on the final splits:\n%s',
        outcome.ranking.metric.words,
        table(outcome),
    )
    path = os.path.join(directory, 'vtab.json')
    write_json(path, as_json(outcome))
    log.info('Wrote the scores to %s', path)


def means(outcome: Outcome) -> dict[str, Mean]:
    """Returns the mean score of every group, and of all tasks as the group 'all'."""
    by_group = {}
    for group in [*dict.fromkeys(outcome.groups.values()), 'all']:
        tasks = [task for task in outcome.groups if group in (outcome.groups[task], 'all')]
        scores = [outcome.scores.get(task) for task in tasks]
        present = [score for score in scores if score is not None]
        mean = None
        if present:
            mean = statistics.mean(present)
        by_group[group] = Mean(mean, len(present), len(tasks))
    return by_group


def table(outcome: Outcome) -> str:
    """Returns a text with the mean of each group and a line for each of its tasks."""
    lines = []
    for group, mean in means(outcome).items():
        label = f'{group}, mean'
        if mean.scored < mean.total:
            label += f', of {mean.scored} of {mean.total} tasks'
        lines.append(f'  {label:<42}{outcome.ranking.text(mean.score, "-")}')
        for task in outcome.groups:
            if outcome.groups[task] == group:
                lines.append(f'    {task:<40}{_result(outcome, task)}')
    return '\n'.join(lines)


def _result(outcome, task):
    """Returns the score of a task as text, or why it has none."""
    if task in outcome.failed:
        return 'failed'
    if task not in outcome.scores:
        return 'no data'
    return outcome.ranking.text(outcome.scores[task], 'diverges')


def notes(outcome: Outcome, directory: str) -> dict[str, str]:
    """Returns a note on each run, by workdir, for the page that compares them: its group."""
    result = {}
    for task, score in outcome.scores.items():
        note = outcome.groups[task]
        if score is None:
            note += ' · diverges'
        result[os.path.join(directory, task)] = note
    return result


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the content of vtab.json.

    The key `test_accuracy` has an accuracy in [0, 1]; with another metric the key is named after
    it, as in `test_loss`.
    """
    key = f'test_{outcome.ranking.key}'
    return {
        'tasks': {
            task: {'group': outcome.groups[task], key: score}
            for task, score in outcome.scores.items()
        },
        'failed': list(outcome.failed),
        'missing': [
            task
            for task in outcome.groups
            if task not in outcome.scores and task not in outcome.failed
        ],
        'means': {
            group: {key: mean.score, 'tasks': mean.scored, 'of': mean.total}
            for group, mean in means(outcome).items()
        },
    }
