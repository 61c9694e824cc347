"""A sweep: trains all members of a grid, chooses the best, and scores it on the test split."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import reporting
from vit_jax.campaigns import grids, outcome, splits
from vit_jax.campaigns import scores as scores_lib
from vit_jax.campaigns.outcome import RATE, name_of, run_names
from vit_jax.errors import DivergedError, UserError, check_at_least
from vit_jax.files import read_json, write_json
from vit_jax.workdir import log_file, record

log = logging.getLogger(__name__)


FEWEST_FOLDS = 2
MOST_FOLDS = 20


class _MemberRun(NamedTuple):
    """A run that trains a member, or a member without one of the folds."""

    name: str  # of its folder
    workdir: str
    config: ConfigDict


def workdirs(
    config: ConfigDict, grid: Mapping[str, Sequence[Any]], directory: str, num_folds: int = 0
) -> dict[str, ConfigDict]:
    """Returns the config of the member of every run of a sweep, by the workdir of the run."""
    return {
        os.path.join(directory, name): config_lib.changed(config, member)
        for member in grids.combinations(grid)
        for name in run_names(member, num_folds)
    }


def run(
    config: ConfigDict,
    grid: Mapping[str, Sequence[Any]],
    directory: str,
    repeats: int = 1,
    part: str = '1/1',
    num_folds: int = 0,
) -> int:
    """Runs a sweep, or resumes it.

    Args:
      config: the config that all members share; config.best_metric ranks them.
      grid: values by dotted field.
      directory: the directory for the workdirs of all runs.
      repeats: number of final runs.
      part: 'I/N': train only every N-th run of the members, starting with the I-th.
      num_folds: folds of dataset.final_split. Each member trains once without each fold, and its
        score is the mean over the folds. 0: each member trains once, on dataset.train_split.

    Returns:
      0, or the exit code of loop.train after a signal, which stops the sweep.

    Raises:
      UserError: if a config, a split or the directory cannot be used. No member has trained then.
      DivergedError: if training diverges with all members, or with the winner.
    """
    check_at_least('--repeats', repeats, 1)
    _check_num_folds(num_folds)
    members = grids.combinations(grid)
    config = _as_begun(config, list(workdirs(config, grid, directory, num_folds)))
    config = splits.complete(config, num_folds)
    final_split = config.dataset.final_split
    runs = _runs(config, members, directory, num_folds)
    _check(runs, directory, repeats, num_folds)
    log_file.log_to(directory)
    log.info('The sweep tries %s', '  '.join(map(name_of, members)))
    if num_folds:
        log.info('Each member trains once without each of %d folds of %s', num_folds, final_split)
    numbers = _part(len(runs), part)
    code, scores = _train_runs([runs[number] for number in numbers])
    if code:
        return code
    if len(numbers) < len(runs):
        log.info(
            'Trained part %s of the sweep. When all parts are trained, run the same command '
            'without --part to choose the winner.',
            part,
        )
        return 0
    result = _compared(config, members, runs, scores, num_folds)
    _report_best(result)
    # With more values another member may win, so each winner has its own workdirs.
    winner = members[result.best]
    workdir = os.path.join(directory, f'final-{name_of(winner)}')
    code, finals = _train_finals(config_lib.changed(config, winner), final_split, repeats, workdir)
    if code:
        return code
    result = result._replace(finals=finals)
    outcome.report(result, directory)
    if config.report:
        reporting.conclude_all(directory, outcome.notes(result, directory))
    return 0


def _check_num_folds(num_folds):
    if num_folds == 0 or FEWEST_FOLDS <= num_folds <= MOST_FOLDS:
        return
    raise UserError(
        f'--folds is {num_folds}: expected a number from {FEWEST_FOLDS} to {MOST_FOLDS}.',
        kind='value',
        field='--folds',
        value=num_folds,
    )


def _as_begun(config, workdirs):
    """Returns the config with the initial values of the first run in the workdirs.

    An earlier version may have trained some members: all members then use the same images.
    """
    for workdir in workdirs:
        if os.path.isfile(os.path.join(workdir, record.CONFIG)):
            recorded, _ = record.read(workdir)
            return config_lib.as_begun(config, recorded)
    return config


def _runs(config, members, directory, num_folds):
    """Returns the runs of all members, member by member."""
    configs = [config]
    if num_folds:
        configs = [splits.fold(config, k, num_folds) for k in range(1, num_folds + 1)]
    runs = []
    for member in members:
        for name, of_fold in zip(run_names(member, num_folds), configs, strict=True):
            changes = {'dataset.final_split': ''} | member  # runs do not read the final split
            changed = config_lib.changed(of_fold, changes)
            runs.append(_MemberRun(name, os.path.join(directory, name), changed))
    return runs


def _check(runs, directory, repeats, num_folds):
    """Raises UserError before hours of training if the sweep could not finish."""
    for member_run in runs:
        config_lib.checked(member_run.config)
        config_lib.checked(member_run.config, {'seed': member_run.config.seed + repeats - 1})
    record.require_no_run(directory)
    record.require_apart(directory, runs[0].config.dataset)
    largest = max(member_run.config.batch_size for member_run in runs)
    checked = set()
    for member_run in runs:
        split = member_run.config.dataset.train_split
        if member_run.config.batch_size == largest and split not in checked:
            checked.add(split)
            _check_training_split(member_run, num_folds)


def _check_training_split(member_run, num_folds):
    """Raises UserError if a new run cannot train on its split."""
    from vit_jax.data.sources import open_split
    from vit_jax.data.subsets import subset
    from vit_jax.training.run_data import check_batch_size, require_training_images

    if record.begun(member_run.workdir):
        return
    dataset = member_run.config.dataset
    train = subset(open_split(dataset, dataset.train_split), dataset.subset, dataset.train_split)
    check_batch_size(member_run.config.batch_size, dataset, train.num_examples)
    if num_folds:  # a class with one image is missing without the fold of this image
        require_training_images(dataset, train, uses_labels=True)


def _part(num_runs, part):
    """Returns the positions of the runs in part 'I/N'."""
    if re.fullmatch(r'\d+/\d+', part):
        number, count = map(int, part.split('/'))
        if 1 <= number <= count <= num_runs:
            return range(number - 1, num_runs, count)
    raise UserError(
        f'--part is {part}: expected I/N, part I of N, as in 1/2, with N at most the '
        f'number of runs of all members, {num_runs}.',
        kind='value',
        field='--part',
        value=part,
    )


def _train_runs(runs):
    """Trains runs; returns (exit code, their scores)."""
    scores = []
    for member_run in runs:
        code, score = _train_run(member_run)
        if code:
            return code, scores
        scores.append(score)
    return 0, scores


def _train_run(member_run):
    """Trains a run; returns (exit code, score), with score None if training diverges."""
    from vit_jax.training import loop  # imports TensorFlow

    name, workdir, config = member_run
    fields = config_lib.flatten(config)
    mark = os.path.join(workdir, 'diverged.json')  # the config of a training that diverged
    if os.path.exists(mark):
        marked = read_json(mark, dict)
        defaults = config_lib.flatten(config_lib.base()) | config_lib.UNRECORDED
        newer = {field: value for field, value in defaults.items() if field in fields}
        if newer | marked == fields:
            log.warning('%s has diverged before: remove %s to try it again', name, mark)
            return 0, None
    try:
        code = loop.train(config, workdir)
    except DivergedError as error:
        log.warning('%s diverges and is not chosen: %s', name, error)
        write_json(mark, fields)
        return 0, None
    if code:
        return code, None
    return 0, scores_lib.last_score(workdir, config.best_metric)


def _compared(config, members, runs, scores, num_folds):
    """Returns the outcome of all members, without final runs.

    Raises:
      DivergedError: if training diverges with all members.
    """
    runs_per_member = len(runs) // len(members)
    scores_of_members = [
        scores[first : first + runs_per_member] for first in range(0, len(runs), runs_per_member)
    ]
    means = [outcome.mean_score(of_member) for of_member in scores_of_members]
    finished = [number for number, mean in enumerate(means) if mean is not None]
    if not finished:
        raise _all_diverge(members, runs)
    described = runs[finished[0] * runs_per_member]
    ranking = scores_lib.ranking(described.workdir, config)
    best = max(finished, key=lambda number: ranking.metric.goodness(means[number]))
    dataset = config.dataset
    eval_split = dataset.eval_split
    fold_scores = None
    if num_folds:
        eval_split = f'{num_folds} folds of {dataset.final_split}'
        fold_scores = scores_of_members
    return outcome.Outcome(
        members,
        means,
        best,
        {},
        eval_split,
        dataset.final_split,
        dataset.test_split,
        ranking,
        fold_scores,
    )


def _all_diverge(members, runs):
    lowest = min(member_run.config.optimizer.learning_rate for member_run in runs)
    return DivergedError(
        f'training diverges with all members: {", ".join(map(name_of, members))}. '
        f'Try smaller learning rates, as in --config.{RATE}={lowest / 100:g},{lowest / 10:g}',
        field=RATE,
        value=lowest,
    )


def _report_best(result):
    """Logs the best member, and its values at an end of the grid."""
    metric = result.ranking.metric
    member = result.members[result.best]
    error = result.error(result.best)
    precision = ''
    if error is not None:
        precision = f', standard error {metric.text(error)}'
    log.info(
        'The best on %s is %s with %s %s%s',
        result.eval_split,
        name_of(member),
        metric.text(result.scores[result.best]),
        metric.words,
        precision,
    )
    for field, value in member.items():
        values = [value for member in result.members]
        is_number = not isinstance(value, str | bool)
        if is_number and value != 0 and value in (min(values), max(values)):
            log.info(
                'Its %s, %g, is the lowest or highest value tried: values beyond it may be better',
                field,
                value,
            )


def _train_finals(config, split, repeats, first_workdir):
    """Trains the winner on `split` with several seeds.

    Returns (exit code, {seed: (score on the test split, workdir)}).
    """
    from vit_jax.training import loop

    finals = {}
    for repeat in range(repeats):
        seed = config.seed + repeat
        workdir = first_workdir
        if repeat > 0:
            workdir += f'_seed={seed}'
        code = loop.train(config_lib.final(config, split, seed), workdir)
        if code:
            return code, finals
        finals[seed] = (scores_lib.last_score(workdir, config.best_metric), workdir)
    return 0, finals
