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
from vit_jax.campaigns.outcome import RATE, name_of
from vit_jax.errors import DivergedError, UserError, check_at_least
from vit_jax.files import read_json, write_json
from vit_jax.workdir import log_file, metrics, record

log = logging.getLogger(__name__)


def workdirs(
    config: ConfigDict, grid: Mapping[str, Sequence[Any]], directory: str
) -> dict[str, ConfigDict]:
    """The config of every member of a sweep, by the workdir in which the member trains."""
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
    """Runs a sweep, or continues it.

    Args:
      config: what all members have in common.
      grid: values by dotted field.
      directory: for the workdirs of all runs.
      repeats: number of final runs.
      part: 'I/N': only train each N-th member, from number I.

    Returns:
      0, or what loop.train returns after a signal, which ends the sweep.

    Raises:
      UserError: if a config, a split or the directory cannot be used, before anything trains.
      DivergedError: if training diverges with all members, or with the winner.
    """
    check_at_least('--repeats', repeats, 1)
    members = grids.combinations(grid)
    config = _as_begun(config, [os.path.join(directory, name_of(member)) for member in members])
    config = splits.complete(config)
    final_split = config.dataset.final_split
    eval_split = config.dataset.eval_split
    config.dataset.final_split = ''  # a run has nothing to do with it
    configs = [config_lib.changed(config, member) for member in members]
    for member_config in configs:  # now, and not after hours of training
        config_lib.checked(member_config)
        config_lib.checked(member_config, {'seed': member_config.seed + repeats - 1})
    record.require_no_run(directory)
    record.require_apart(directory, config.dataset)
    _check_largest_batch(members, configs, directory)
    log_file.log_to(directory)
    log.info('the sweep tries %s', '  '.join(map(name_of, members)))
    scores = []
    for member, member_config in _part(list(zip(members, configs, strict=True)), part):
        name = name_of(member)
        code, score = _score(member_config, name, os.path.join(directory, name))
        if code:
            return code
        scores.append(score)
    if len(scores) < len(members):
        log.info(
            'part %s of the sweep is trained. When all are, the same command without --part '
            'chooses.',
            part,
        )
        return 0
    best = _choose(members, scores, configs, eval_split)
    # With more values another member may win: each winner has workdirs of its own.
    workdir = os.path.join(directory, f'final-{name_of(members[best])}')
    code, finals = _train_finals(configs[best], final_split, repeats, workdir)
    if code:
        return code
    result = outcome.Outcome(
        members, scores, best, finals, eval_split, final_split, config.dataset.test_split
    )
    outcome.report(result, directory)
    if config.report:
        reporting.conclude_all(directory, outcome.notes(result, directory))
    return 0


def _as_begun(config, workdirs):
    """The config with what the first of the workdirs that has a run began with.

    All members are then compared on the same images, also where an earlier version trained some.
    """
    for workdir in workdirs:
        if os.path.isfile(os.path.join(workdir, record.CONFIG)):
            recorded, _ = record.read(workdir)
            return config_lib.as_begun(config, recorded)
    return config


def _check_largest_batch(members, configs, directory):
    """Raises UserError, before the first member trains, if a batch exceeds the training split."""
    from vit_jax.data.sources import open_split
    from vit_jax.data.subsets import subset
    from vit_jax.training.run_data import check_batch_size

    largest = max(range(len(configs)), key=lambda number: configs[number].batch_size)
    if record.begun(os.path.join(directory, name_of(members[largest]))):
        return
    dataset = configs[largest].dataset
    train = subset(open_split(dataset, dataset.train_split), dataset.subset, dataset.train_split)
    check_batch_size(configs[largest], train.num_examples)


def _part(members, part):
    """Those members that 'I/N' names."""
    if re.fullmatch(r'\d+/\d+', part):
        number, count = map(int, part.split('/'))
        if 1 <= number <= count <= len(members):
            return members[number - 1 :: count]
    raise UserError(
        f'--part={part}: expected I/N, part I of N, as in 1/2, with N at most the '
        f'number of members, {len(members)}.'
    )


def _score(config, name, folder):
    """(exit code of the run in the folder, its accuracy or None where training diverges)."""
    from vit_jax.training import loop  # imports TensorFlow

    fields = config_lib.flatten(config)
    mark = os.path.join(folder, 'diverged.json')  # contains the config with which it did
    if os.path.exists(mark):
        marked = read_json(mark, dict)
        defaults = config_lib.flatten(config_lib.base()) | config_lib.UNRECORDED
        newer = {field: value for field, value in defaults.items() if field in fields}
        if newer | marked == fields:
            log.warning('%s has diverged before: remove %s to try it again', name, mark)
            return 0, None
    try:
        code = loop.train(config, folder)
    except DivergedError as error:
        log.warning('%s diverges and is not chosen: %s', name, error)
        write_json(mark, fields)
        return 0, None
    if code:
        return code, None
    return 0, metrics.last_accuracy(folder)


def _choose(members, scores, configs, split):
    """The number of the member of the highest score; DivergedError when none has a score."""
    finished = [number for number, score in enumerate(scores) if score is not None]
    if not finished:
        least = min(config.optimizer.learning_rate for config in configs)
        raise DivergedError(
            f'training diverges with all members: {", ".join(map(name_of, members))}. '
            f'Try smaller learning rates, as in --config.{RATE}={least / 100:g},{least / 10:g}'
        )
    best = max(finished, key=scores.__getitem__)
    log.info(
        'the best on %s is %s with %.2f %% accuracy',
        split,
        name_of(members[best]),
        100 * scores[best],
    )
    for field, value in members[best].items():
        values = [member[field] for member in members]
        is_number = not isinstance(value, str | bool)
        if is_number and value != 0 and value in (min(values), max(values)):
            log.info(
                'its %s, %g, is at an end of those tried: others beyond it may be better',
                field,
                value,
            )
    return best


def _train_finals(config, split, repeats, folder):
    """(exit code, {seed: (accuracy on the test split, workdir)}) of runs on the final split."""
    from vit_jax.training import loop

    finals = {}
    for seed in range(config.seed, config.seed + repeats):
        workdir = folder + (f'_seed={seed}' if finals else '')
        code = loop.train(config_lib.final(config, split, seed), workdir)
        if code:
            return code, finals
        finals[seed] = metrics.last_accuracy(workdir), workdir
    return 0, finals
