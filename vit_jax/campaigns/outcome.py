"""The outcome of a sweep: a table and a figure of all its members, and sweep.json."""

import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.campaigns.scores import ACCURACY, Ranking
from vit_jax.files import write_json

log = logging.getLogger(__name__)

RATE = 'optimizer.learning_rate'


class Outcome(NamedTuple):
    """The scores of a finished sweep."""

    members: list[dict[str, Any]]  # values by dotted field; all have the same fields
    scores: list[float | None]  # values of the metric on eval_split; None if training diverges.
    # In a cross-validated sweep they are means over the folds.
    best: int  # position in members
    finals: dict[int, tuple[float, str]]  # by seed: (value of the metric on test_split, workdir)
    eval_split: str  # '5 folds of train' in a cross-validated sweep
    final_split: str
    test_split: str
    ranking: Ranking = ACCURACY
    fold_scores: list[list[float | None]] | None = None  # of each member; None without folds

    def error(self, number: int) -> float | None:
        """The standard error of the score of a member; None if it diverges or has no folds."""
        if self.fold_scores is None:
            return None
        scores = [score for score in self.fold_scores[number] if score is not None]
        if len(scores) < len(self.fold_scores[number]):
            return None
        return standard_error(scores)

    @property
    def num_folds(self) -> int:
        """The number of folds; 0 if the sweep is not cross-validated."""
        if self.fold_scores is None:
            return 0
        return len(self.fold_scores[0])


def text_of(value: Any) -> str:
    """Returns a value as text for directory names: '0.001' for 0.001, '1000' for 1000.0."""
    if isinstance(value, float):
        return f'{value:.12g}'
    return str(value)


def name_of(member: Mapping[str, Any]) -> str:
    """Returns the directory name of a member: 'lr=0.01_optimizer.weight_decay=0.1'."""
    parts = []
    for field, value in member.items():
        name = 'lr' if field == RATE else field
        parts.append(f'{name}={text_of(value)}')
    return '_'.join(parts)


def run_names(member: Mapping[str, Any], num_folds: int) -> list[str]:
    """Returns the directory names of the runs of a member: one, or one for each fold."""
    name = name_of(member)
    if not num_folds:
        return [name]
    return [f'{name}_fold={number}of{num_folds}' for number in range(1, num_folds + 1)]


def mean_score(scores: Sequence[float | None]) -> float | None:
    """Returns the mean of the scores of a member's runs; None if one of them diverges."""
    finished = [score for score in scores if score is not None]
    if len(finished) < len(scores):
        return None
    return statistics.mean(finished)


def standard_error(scores: Sequence[float]) -> float:
    """Returns the sample standard deviation of the scores over the root of their number."""
    return statistics.stdev(scores) / math.sqrt(len(scores))


def report(outcome: Outcome, directory: str) -> None:
    """Logs the outcome and writes it to sweep.json and sweep.png in the directory."""
    from vit_jax.workdir import curves  # imports matplotlib, which --help does not need

    ranking = outcome.ranking
    metric = ranking.metric
    log.info('%s on %s of all members:\n%s', metric.words, outcome.eval_split, table(outcome))
    for seed, (score, workdir) in outcome.finals.items():
        log.info(
            '%s, seed %d, trained on %s: %s %s on %s, in %s',
            name_of(outcome.members[outcome.best]),
            seed,
            outcome.final_split,
            metric.text(score),
            metric.words,
            outcome.test_split,
            workdir,
        )
    mean, deviation = _mean_and_deviation(outcome)
    if deviation is not None:
        log.info(
            'mean of the %d: %s, standard deviation %s',
            len(outcome.finals),
            metric.text(mean),
            metric.text(deviation),
        )
    path = os.path.join(directory, 'sweep')
    curves.save(figure(outcome), f'{path}.png')
    write_json(f'{path}.json', as_json(outcome, directory))
    log.info('Wrote the scores to %s.json and the figure to %s.png', path, path)


def table(outcome: Outcome) -> str:
    """Returns a text with a line of values and score for every member."""
    ranking = outcome.ranking
    rows = [[*outcome.members[0], ranking.metric.words]]
    for number, member in enumerate(outcome.members):
        score = ranking.text(outcome.scores[number], 'diverges')
        rows.append([*map(text_of, member.values()), score])
    if outcome.num_folds:
        rows[0].append('standard error')
        for number, row in enumerate(rows[1:]):
            row.append(ranking.text(outcome.error(number), ''))
    for number, row in enumerate(rows, start=-1):
        note = ''
        if number == outcome.best:
            note = 'the best'
        row.append(note)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f'  {"  ".join(cells)}'.rstrip())
    return '\n'.join(lines)


def figure(outcome: Outcome) -> Any:
    """Draws the score over the field with the most values.

    Each combination of the other fields has its own line. The values are evenly spaced on the axis,
    because a grid of learning rates is nearly even on a logarithmic scale.

    Returns:
      A matplotlib Figure.
    """
    from matplotlib.figure import Figure

    # An escaped $ does not start a formula.
    members = [
        {field: text_of(value).replace('$', r'\$') for field, value in member.items()}
        for member in outcome.members
    ]
    values_of = {
        field: list(dict.fromkeys(member[field] for member in members)) for field in members[0]
    }
    across = max(values_of, key=lambda field: len(values_of[field]))
    metric = outcome.ranking.metric
    scale = 1
    unit = ''
    if metric.unit == 'percent':
        scale = 100
        unit = ' (%)'
    lines: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    diverging = []
    for number, (member, score) in enumerate(zip(members, outcome.scores, strict=True)):
        others = ', '.join(f'{field} {member[field]}' for field in member if field != across)
        line = lines.setdefault(others, [])
        if score is None:
            line.append(float('nan'))
            diverging.append(member[across])
        else:
            line.append(scale * score)
        errors.setdefault(others, []).append(scale * (outcome.error(number) or 0))
    result = Figure(figsize=(7, 4.5), layout='constrained')
    axes = result.subplots()
    for others, line in lines.items():
        label = f'{others} on {outcome.eval_split}'.strip()
        if outcome.num_folds:
            axes.errorbar(values_of[across], line, errors[others], fmt='.-', capsize=3, label=label)
        else:
            axes.plot(values_of[across], line, '.-', label=label)
    if diverging:
        axes.plot(
            diverging,
            [0 for _ in diverging],
            'rx',
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label='diverges',
        )
    mean, deviation = _mean_and_deviation(outcome)
    axes.errorbar(
        [members[outcome.best][across]],
        [scale * mean],
        [scale * (deviation or 0)],
        fmt='k*',
        capsize=4,
        label=f'the best, on {outcome.test_split}',
    )
    axes.set(xlabel=across, ylabel=f'{metric.words}{unit}')
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return result


def _mean_and_deviation(outcome):
    """Returns mean and sample standard deviation of the final scores, or (score, None)."""
    scores = [score for score, _ in outcome.finals.values()]
    if len(scores) == 1:
        return scores[0], None
    return statistics.mean(scores), statistics.stdev(scores)


def notes(outcome: Outcome, directory: str) -> dict[str, str]:
    """Returns the note of each run on the page that compares them, by workdir; mostly ''."""
    result = {}
    for number, member in enumerate(outcome.members):
        note = ''
        if outcome.scores[number] is None:
            note = 'diverges'
        elif number == outcome.best:
            note = 'the best'
        names = run_names(member, outcome.num_folds)
        if outcome.num_folds:
            note = _note_of_folds(outcome, number, note)
        for name in names:
            result[os.path.join(directory, name)] = note
    for _, workdir in outcome.finals.values():
        result[workdir] = ''
    return result


def _note_of_folds(outcome, number, note):
    """Returns the note of the runs of a member: its mean over the folds."""
    error = outcome.error(number)
    if error is None:
        return note
    text = outcome.ranking.metric.text
    mean = (
        f'mean of {outcome.num_folds} folds {text(outcome.scores[number])}, '
        f'standard error {text(error)}'
    )
    return ' · '.join([part for part in (note, mean) if part])


def as_json(outcome: Outcome, directory: str) -> dict[str, Any]:
    """Returns the content of sweep.json.

    `test_accuracy` and `workdir` belong to the first final run. With another metric, the key of the
    metric replaces `accuracy` in the names, as in `eval_loss`. In a cross-validated sweep,
    `eval_accuracy` is the mean over the folds. Each member then has its standard error and the
    score and workdir of each fold.
    """
    winner = outcome.members[outcome.best]
    has_one_field = len(winner) == 1

    def short_name(member):
        if has_one_field:
            return text_of(*member.values())
        return name_of(member)

    best = name_of(winner)
    if has_one_field:
        (best,) = winner.values()
    eval_key = f'eval_{outcome.ranking.key}'
    test_key = f'test_{outcome.ranking.key}'
    finals = [
        {'seed': seed, test_key: score, 'workdir': workdir}
        for seed, (score, workdir) in outcome.finals.items()
    ]
    mean, deviation = _mean_and_deviation(outcome)
    scored = list(zip(outcome.members, outcome.scores, strict=True))
    return {
        'eval_split': outcome.eval_split,
        eval_key: {short_name(member): score for member, score in scored},
        'best': best,
        'test_split': outcome.test_split,
        test_key: finals[0][test_key],
        'workdir': finals[0]['workdir'],
        'members': [
            {'values': member, eval_key: score}
            | _runs_as_json(outcome, number, eval_key, directory)
            for number, (member, score) in enumerate(scored)
        ],
        'final_split': outcome.final_split,
        'repeats': finals,
        f'{test_key}_mean': mean,
        f'{test_key}_deviation': deviation,
    }


def _runs_as_json(outcome, number, eval_key, directory):
    """Returns the entries of sweep.json about the runs of a member."""
    workdirs = [
        os.path.join(directory, name)
        for name in run_names(outcome.members[number], outcome.num_folds)
    ]
    if outcome.fold_scores is None:
        return {'workdir': workdirs[0]}
    fold_scores = outcome.fold_scores[number]
    return {
        f'{eval_key}_standard_error': outcome.error(number),
        'folds': [
            {eval_key: score, 'workdir': workdir}
            for score, workdir in zip(fold_scores, workdirs, strict=True)
        ],
    }
