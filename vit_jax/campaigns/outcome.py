"""The outcome of a sweep: a table and a picture of all its members, and sweep.json."""

import logging
import os
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.files import write_json

log = logging.getLogger(__name__)

RATE = 'optimizer.learning_rate'


class Outcome(NamedTuple):
    """What a sweep has reached."""

    members: list[dict[str, Any]]  # values by dotted field; all have the same fields
    scores: list[float | None]  # accuracy on eval_split in [0, 1]; None where training diverges
    best: int  # position in members
    finals: dict[int, tuple[float, str]]  # by seed: accuracy on test_split, workdir
    eval_split: str
    final_split: str
    test_split: str


def text_of(value: Any) -> str:
    """A value in names of directories: 0.001 as '0.001', 1000.0 as '1000'."""
    return f'{value:.12g}' if isinstance(value, float) else str(value)


def name_of(member: Mapping[str, Any]) -> str:
    """The name of the directory of a member: 'lr=0.01_optimizer.weight_decay=0.1'."""
    return '_'.join(
        f'{"lr" if field == RATE else field}={text_of(value)}' for field, value in member.items()
    )


def percent(accuracy: float | None, otherwise: str) -> str:
    """An accuracy in [0, 1] as '50.00 %'; `otherwise` where there is none."""
    if accuracy is None:
        return otherwise
    return f'{100 * accuracy:.2f} %'


def report(outcome: Outcome, directory: str) -> None:
    """Logs the outcome and writes it to sweep.json and sweep.png in the directory."""
    from vit_jax.workdir import curves  # imports matplotlib, for which --help need not wait

    log.info('accuracy on %s of all that were tried:\n%s', outcome.eval_split, table(outcome))
    for seed, (accuracy, workdir) in outcome.finals.items():
        log.info(
            '%s, seed %d, trained on %s: %.2f %% accuracy on %s, in %s',
            name_of(outcome.members[outcome.best]),
            seed,
            outcome.final_split,
            100 * accuracy,
            outcome.test_split,
            workdir,
        )
    mean, deviation = _mean_and_deviation(outcome)
    if deviation is not None:
        log.info(
            'mean of the %d: %.2f %%, standard deviation %.2f %%',
            len(outcome.finals),
            100 * mean,
            100 * deviation,
        )
    path = os.path.join(directory, 'sweep')
    curves.save(figure(outcome), f'{path}.png')
    write_json(f'{path}.json', as_json(outcome, directory))
    log.info('numbers and picture: %s.json and %s.png', path, path)


def table(outcome: Outcome) -> str:
    """A line of values and accuracy for every member."""
    rows = [[*outcome.members[0], 'accuracy', '']]
    for number, member in enumerate(outcome.members):
        accuracy = percent(outcome.scores[number], 'diverges')
        best = 'the best' if number == outcome.best else ''
        rows.append([*map(text_of, member.values()), accuracy, best])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join(['', *map(str.ljust, row, widths)]).rstrip() for row in rows)


def figure(outcome: Outcome) -> Any:
    """A Figure: accuracy over the values of one field, a line for each combination of the others'.

    It is the field with the most values. They are evenly spaced, as a grid of learning rates nearly
    is on a logarithmic scale.
    """
    from matplotlib.figure import Figure

    scores = outcome.scores
    members = [
        {field: text_of(value).replace('$', r'\$') for field, value in member.items()}
        for member in outcome.members
    ]  # or two of them would be around mathematics
    ticks = {
        field: list(dict.fromkeys(member[field] for member in members)) for field in members[0]
    }
    across = max(ticks, key=lambda field: len(ticks[field]))
    lines: dict[str, list[float]] = {}
    for member, score in zip(members, scores, strict=True):
        others = ', '.join(f'{field} {member[field]}' for field in member if field != across)
        lines.setdefault(others, []).append(float('nan') if score is None else 100 * score)
    result = Figure(figsize=(7, 4.5), layout='constrained')
    axes = result.subplots()
    for others, line in lines.items():
        axes.plot(ticks[across], line, '.-', label=f'{others} on {outcome.eval_split}'.strip())
    diverging = [
        member[across] for member, score in zip(members, scores, strict=True) if score is None
    ]
    if diverging:
        axes.plot(
            diverging,
            [0] * len(diverging),
            'rx',
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label='diverges',
        )
    mean, deviation = _mean_and_deviation(outcome)
    axes.errorbar(
        [members[outcome.best][across]],
        [100 * mean],
        [100 * (deviation or 0)],
        fmt='k*',
        capsize=4,
        label=f'the best, on {outcome.test_split}',
    )
    axes.set(xlabel=across, ylabel='accuracy (%)')
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return result


def _mean_and_deviation(outcome):
    """Of the final accuracies; the deviation is that of a sample, None of a single one."""
    accuracies = [accuracy for accuracy, _ in outcome.finals.values()]
    deviation = statistics.stdev(accuracies) if len(accuracies) > 1 else None
    return statistics.mean(accuracies), deviation


def notes(outcome: Outcome, directory: str) -> dict[str, str]:
    """What is to be said of each run beside the others, by workdir; '' of most."""
    result = {}
    for number, member in enumerate(outcome.members):
        note = ''
        if outcome.scores[number] is None:
            note = 'diverges'
        elif number == outcome.best:
            note = 'the best'
        result[os.path.join(directory, name_of(member))] = note
    for _, workdir in outcome.finals.values():
        result[workdir] = ''
    return result


def as_json(outcome: Outcome, directory: str) -> dict[str, Any]:
    """The content of sweep.json; `test_accuracy` and `workdir` are those of the first final run."""
    winner = outcome.members[outcome.best]
    has_one_field = len(winner) == 1
    finals = [
        {'seed': seed, 'test_accuracy': accuracy, 'workdir': workdir}
        for seed, (accuracy, workdir) in outcome.finals.items()
    ]
    mean, deviation = _mean_and_deviation(outcome)
    scored = list(zip(outcome.members, outcome.scores, strict=True))
    return {
        'eval_split': outcome.eval_split,
        'eval_accuracy': {
            text_of(*member.values()) if has_one_field else name_of(member): score
            for member, score in scored
        },
        'best': list(winner.values())[0] if has_one_field else name_of(winner),
        'test_split': outcome.test_split,
        'test_accuracy': finals[0]['test_accuracy'],
        'workdir': finals[0]['workdir'],
        'members': [
            {
                'values': member,
                'eval_accuracy': score,
                'workdir': os.path.join(directory, name_of(member)),
            }
            for member, score in scored
        ],
        'final_split': outcome.final_split,
        'repeats': finals,
        'test_accuracy_mean': mean,
        'test_accuracy_deviation': deviation,
    }
