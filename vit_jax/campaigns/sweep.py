"""A sweep: trains all members of a grid, chooses the best, and scores it on the test split."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import reporting
from vit_jax.campaigns import grids, outcome, splits
from vit_jax.campaigns import scores as scores_lib
from vit_jax.campaigns.outcome import RATE, name_of
from vit_jax.errors import DivergedError, UserError, check_at_least
from vit_jax.files import read_json, write_json
from vit_jax.workdir import log_file, record

log = logging.getLogger(__name__)


def workdirs(
    config: ConfigDict, grid: Mapping[str, Sequence[Any]], directory: str
) -> dict[str, ConfigDict]:
    """Returns the config of every member of a sweep, by the workdir of the member."""
    return {
        os.path.join(directory, name_of(member)): config_lib.changed(config, member)
        for member in grids.combinations(grid)
    }


def run(
    config: ConfigDict,
    grid: Mapping[str, Sequence[Any]],
    directory: str,
    repeats: int = 1,
    part: str = '1/1',
) -> int:
    """Runs a sweep, or resumes it.

    Args:
      config: the config that all members share; config.best_metric ranks them.
      grid: values by dotted field.
      directory: the directory for the workdirs of all runs.
      repeats: number of final runs.
      part: 'I/N': train only every N-th member, starting with the I-th.

    Returns:
      0, or the exit code of loop.train after a signal, which stops the sweep.

    Raises:
      UserError: if a config, a split or the directory cannot be used. No member has trained then.
      DivergedError: if training diverges with all members, or with the winner.
    """
    check_at_least('--repeats', repeats, 1)
    members = grids.combinations(grid)
    config = _as_begun(config, [os.path.join(directory, name_of(member)) for member in members])
    config = splits.complete(config)
    final_split = config.dataset.final_split
    config.dataset.final_split = ''  # the runs themselves do not read it
    configs = [config_lib.changed(config, member) for member in members]
    _check(members, configs, directory, repeats)
    log_file.log_to(directory)
    log.info('The sweep tries %s', '  '.join(map(name_of, members)))
    numbers = _part(len(members), part)
    code, scores = _train_members(members, configs, directory, numbers)
    if code:
        return code
    if len(numbers) < len(members):
        log.info(
            'Trained part %s of the sweep. When all parts are trained, run the same command '
            'without --part to choose the winner.',
            part,
        )
        return 0
    _require_scores(members, scores, configs)
    first = next(number for number, score in enumerate(scores) if score is not None)
    ranking = scores_lib.ranking(os.path.join(directory, name_of(members[first])), config)
    best = _choose(members, scores, ranking, config.dataset.eval_split)
    # With more values another member may win, so each winner has its own workdirs.
    workdir = os.path.join(directory, f'final-{name_of(members[best])}')
    code, finals = _train_finals(configs[best], final_split, repeats, workdir)
    if code:
        return code
    dataset = config.dataset
    result = outcome.Outcome(
        members, scores, best, finals, dataset.eval_split, final_split, dataset.test_split, ranking
    )
    outcome.report(result, directory)
    if config.report:
        reporting.conclude_all(directory, outcome.notes(result, directory))
    return 0


def _as_begun(config, workdirs):
    """Returns the config with the initial values of the first run in the workdirs.

    An earlier version may have trained some members: all members then use the same images.
    """
    for workdir in workdirs:
        if os.path.isfile(os.path.join(workdir, record.CONFIG)):
            recorded, _ = record.read(workdir)
            return config_lib.as_begun(config, recorded)
    return config


def _check(members, configs, directory, repeats):
    """Raises UserError before hours of training if the sweep could not finish."""
    for config in configs:
        config_lib.checked(config)
        config_lib.checked(config, {'seed': config.seed + repeats - 1})
    record.require_no_run(directory)
    record.require_apart(directory, configs[0].dataset)
    _check_largest_batch(members, configs, directory)


def _check_largest_batch(members, configs, directory):
    """Raises UserError if a batch exceeds the training split."""
    from vit_jax.data.sources import open_split
    from vit_jax.data.subsets import subset
    from vit_jax.training.run_data import check_batch_size

    largest = max(range(len(configs)), key=lambda number: configs[number].batch_size)
    if record.begun(os.path.join(directory, name_of(members[largest]))):
        return
    dataset = configs[largest].dataset
    train = subset(open_split(dataset, dataset.train_split), dataset.subset, dataset.train_split)
    check_batch_size(configs[largest].batch_size, dataset, train.num_examples)


def _part(num_members, part):
    """Returns the positions of the members in part 'I/N'."""
    if re.fullmatch(r'\d+/\d+', part):
        number, count = map(int, part.split('/'))
        if 1 <= number <= count <= num_members:
            return range(number - 1, num_members, count)
    raise UserError(
        f'--part is {part}: expected I/N, part I of N, as in 1/2, with N at most the '
        f'number of members, {num_members}.',
        kind='value',
        field='--part',
        value=part,
    )


def _train_members(members, configs, directory, numbers):
    """Trains the members at some positions; returns (exit code, their scores)."""
    scores = []
    for number in numbers:
        name = name_of(members[number])
        code, score = _train_member(configs[number], name, os.path.join(directory, name))
        if code:
            return code, scores
        scores.append(score)
    return 0, scores


def _train_member(config, name, workdir):
    """Trains a member; returns (exit code, score), with score None if training diverges."""
    from vit_jax.training import loop  # imports TensorFlow

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


def _require_scores(members, scores, configs):
    """Raises DivergedError if training diverges with all members."""
    if any(score is not None for score in scores):
        return
    lowest = min(config.optimizer.learning_rate for config in configs)
    raise DivergedError(
        f'training diverges with all members: {", ".join(map(name_of, members))}. '
        f'Try smaller learning rates, as in --config.{RATE}={lowest / 100:g},{lowest / 10:g}',
        field=RATE,
        value=lowest,
    )


def _choose(members, scores, ranking, split):
    """Logs and returns the position of the member with the best score."""
    finished = [number for number, score in enumerate(scores) if score is not None]
    metric = ranking.metric
    best = max(finished, key=lambda number: metric.goodness(scores[number]))
    log.info(
        'The best on %s is %s with %s %s',
        split,
        name_of(members[best]),
        metric.text(scores[best]),
        metric.words,
    )
    for field, value in members[best].items():
        values = [member[field] for member in members]
        is_number = not isinstance(value, str | bool)
        if is_number and value != 0 and value in (min(values), max(values)):
            log.info(
                'Its %s, %g, is the lowest or highest value tried: values beyond it may be better',
                field,
                value,
            )
    return best


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
