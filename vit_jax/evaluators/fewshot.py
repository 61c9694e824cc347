"""Few-shot accuracy of frozen features (section 4.1): a few examples of each class, by seed."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from vit_jax.errors import UserError
from vit_jax.evaluators import probes
from vit_jax.evaluators.features import Features
from vit_jax.evaluators.metric import Metric

LEAST_SQUARES = 'least squares'
# What least squares is held against, by the names in the table. The linear probe takes all.
OTHERS = {
    'nearest prototype': probes.nearest_prototype,
    f'{probes.NEIGHBOURS} nearest': probes.nearest_neighbours,
}
LINEAR_PROBE = 'linear probe'


def check_examples(
    labels: Int[np.ndarray, ' images'], class_names: Sequence[str], shots: Sequence[int], where: str
) -> None:
    """Raises UserError unless there are two classes or more, with enough examples of each.

    `where` names the split in messages.
    """
    if len(class_names) < 2:
        raise UserError(
            f'{where} has one class, {", ".join(class_names)}: few-shot needs two or more.'
        )
    counts = np.bincount(labels, minlength=len(class_names))
    if few := [
        f'{name} ({count})'
        for name, count in zip(class_names, counts, strict=True)
        if count < max(shots)
    ]:
        raise UserError(
            f'{max(shots)} shots are more than {where} has of {len(few)} of '
            f'{len(class_names)} classes: {", ".join(few)}. Ask for at most '
            f'{counts.min()} shots, or take a larger split.'
            if counts.min()
            else f'{where} has no example of {len(few)} of {len(class_names)} classes: '
            f'{", ".join(few)}. Take a larger split, or remove empty folders.'
        )


def check_single_label(source: Any, name: str) -> None:
    """Raises UserError if the images of a data source have several labels."""
    if source.multi_label:
        raise UserError(
            f'images of {name} have several labels, and few-shot accuracy is of one: '
            'take a data set with one label for each image.'
        )


def draw(train: Features, num_classes: int, shots: int, seed: int) -> Features:
    """`shots` examples of each class; with the same seed, more shots keep those of fewer.

    The draw is big_vision's for features in the same order.
    """
    generator = np.random.default_rng(seed)
    chosen = np.concatenate(
        [
            generator.permutation(np.flatnonzero(train.labels == k))[:shots]
            for k in range(num_classes)
        ]
    )
    return Features(train.values[chosen], train.labels[chosen])


def least_squares_accuracies(
    train: Features,
    test: Features,
    num_classes: int,
    shots: Sequence[int],
    seeds: int,
    l2: tuple[float, ...],
) -> dict[tuple[int, float], list[float]]:
    """Accuracies in [0, 1] by (shots, L2): that of each seed from 0 on."""
    found = collections.defaultdict(list)
    for count in shots:
        for seed in range(seeds):
            scores = probes.least_squares(
                draw(train, num_classes, count, seed), test.values, num_classes, l2
            )
            for value, answers in zip(l2, scores, strict=True):
                found[count, value].append(_accuracy(answers, test))
    return dict(found)


def metrics_of(shots: Sequence[int]) -> list[Metric]:
    """The descriptions of what `metrics` returns."""
    found = []
    for count in shots:
        name = f'{count}shot'
        accuracy = Metric(
            name, 'percent', 'highest', 'few-shot accuracy', name, title=f'Few-shot, {name}'
        )
        found += [accuracy, Metric(f'{name}_deviation', 'percent')]
    return found


def metrics(
    train: Features, test: Features, num_classes: int, shots: Sequence[int], seeds: int, l2: float
) -> dict[str, float]:
    """Nshot, the mean accuracy in [0, 1] over the seeds, and its standard deviation."""
    accuracies = least_squares_accuracies(train, test, num_classes, shots, seeds, (l2,))
    rows = [_row(count, LEAST_SQUARES, found) for (count, _), found in accuracies.items()]
    return {
        f'{row["shots"]}shot{suffix}': row[key]
        for row in rows
        for suffix, key in (('', 'accuracy'), ('_deviation', 'deviation'))
        if row[key] is not None
    }


def compare(
    train: Features,
    test: Features,
    num_classes: int,
    shots: Sequence[int],
    seeds: int,
    l2: tuple[float, ...],
) -> Iterator[dict[str, Any]]:
    """Rows of all methods for all shots, then for all training examples at once.

    Each has `shots` (None for all), `method`, `l2` (of least squares), `accuracies` in [0, 1] of
    each seed, their mean `accuracy` and `deviation`, the standard deviation of a sample, None for
    one.
    """
    squares = least_squares_accuracies(train, test, num_classes, shots, seeds, l2)
    for count in shots:
        for value in l2:
            yield _row(count, LEAST_SQUARES, squares[count, value], value)
        drawn = [draw(train, num_classes, count, seed) for seed in range(seeds)]
        for name, method in OTHERS.items():
            yield _row(
                count,
                name,
                [_accuracy(method(few, test.values, num_classes), test) for few in drawn],
            )
    scores = probes.least_squares(train, test.values, num_classes, l2)
    for value, answers in zip(l2, scores, strict=True):
        yield _row(None, LEAST_SQUARES, [_accuracy(answers, test)], value)
    for name, method in (OTHERS | {LINEAR_PROBE: probes.linear_probe}).items():
        yield _row(None, name, [_accuracy(method(train, test.values, num_classes), test)])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `compare` as a table, a line for each number of shots, a column for each method."""
    cells = {(row['shots'], _column(row)): _percent(row) for row in rows}
    columns = list(dict.fromkeys(map(_column, rows)))
    lines = [['shots', *columns]] + [
        ['all' if count is None else str(count), *(cells.get((count, c), '') for c in columns)]
        for count in dict.fromkeys(row['shots'] for row in rows)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return '\n'.join(
        '  '.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _accuracy(scores, test):
    return float(np.mean(scores.argmax(axis=1) == test.labels))


def _row(shots, method, accuracies, l2=None):
    deviation = float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else None
    return {
        'shots': shots,
        'method': method,
        'l2': l2,
        'accuracy': float(np.mean(accuracies)),
        'deviation': deviation,
        'accuracies': accuracies,
    }


def _column(row):
    return row['method'] + ('' if row['l2'] is None else f', L2 {row["l2"]:g}')


def _percent(row):
    spread = '' if row['deviation'] is None else f' ± {100 * row["deviation"]:.2f}'
    return f'{100 * row["accuracy"]:.2f}{spread}'
