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
# Methods that are compared with least squares, by their names in the table. The linear probe always
# learns from all examples.
OTHERS = {
    'nearest prototype': probes.nearest_prototype,
    f'{probes.NEIGHBOURS} nearest': probes.nearest_neighbours,
}
LINEAR_PROBE = 'linear probe'


def check_examples(
    labels: Int[np.ndarray, ' images'], class_names: Sequence[str], shots: Sequence[int], where: str
) -> None:
    """Raises UserError unless there are two classes or more with enough examples each.

    Args:
      labels: the labels of the split that classifiers learn from.
      class_names: the class names of the split.
      shots: numbers of examples per class.
      where: the name of the split in messages.
    """
    if len(class_names) < 2:
        raise UserError(
            f'{where} has one class, {", ".join(class_names)}: few-shot needs two or more.',
            kind='content',
        )
    counts = np.bincount(labels, minlength=len(class_names))
    small_classes = [
        f'{name} ({count})'
        for name, count in zip(class_names, counts, strict=True)
        if count < max(shots)
    ]
    if not small_classes:
        return
    names = ', '.join(small_classes)
    if counts.min() == 0:
        raise UserError(
            f'{where} has no example of {len(small_classes)} of {len(class_names)} classes: '
            f'{names}. Use a larger split, or remove empty folders.',
            kind='content',
        )
    raise UserError(
        f'{max(shots)} shots are more than {where} has of {len(small_classes)} of '
        f'{len(class_names)} classes: {names}. Use at most {counts.min()} shots, or a larger '
        'split.',
        kind='value',
        value=max(shots),
    )


def check_single_label(source: Any, name: str) -> None:
    """Raises UserError if the images of a data source have several labels."""
    if source.multi_label:
        raise UserError(
            f'images of {name} have several labels, and few-shot accuracy needs one: '
            'use a data set with one label for each image.',
            kind='content',
        )


def draw(train: Features, num_classes: int, shots: int, seed: int) -> Features:
    """Draws `shots` examples of each class; with the same seed, more shots include fewer shots.

    big_vision draws the same examples if the features are in the same order.
    """
    generator = np.random.default_rng(seed)
    indices = []
    for k in range(num_classes):
        of_class = np.flatnonzero(train.labels == k)
        indices.append(generator.permutation(of_class)[:shots])
    drawn = np.concatenate(indices)
    return Features(train.values[drawn], train.labels[drawn])


def least_squares_accuracies(
    train: Features,
    test: Features,
    num_classes: int,
    shots: Sequence[int],
    seeds: int,
    l2: tuple[float, ...],
) -> dict[tuple[int, float], list[float]]:
    """Accuracies in [0, 1] by (shots, L2), one for each seed 0, 1, ..."""
    accuracies = collections.defaultdict(list)
    for count in shots:
        for seed in range(seeds):
            examples = draw(train, num_classes, count, seed)
            scores_by_l2 = probes.least_squares(examples, test.values, num_classes, l2)
            for value, scores in zip(l2, scores_by_l2, strict=True):
                accuracies[count, value].append(_accuracy(scores, test))
    return dict(accuracies)


def metrics_of(shots: Sequence[int]) -> list[Metric]:
    """The descriptions of the metrics that `metrics` returns."""
    descriptions = []
    for count in shots:
        name = f'{count}shot'
        accuracy = Metric(
            name, 'percent', 'highest', 'few-shot accuracy', name, title=f'Few-shot, {name}'
        )
        descriptions += [accuracy, Metric(f'{name}_deviation', 'percent')]
    return descriptions


def metrics(
    train: Features, test: Features, num_classes: int, shots: Sequence[int], seeds: int, l2: float
) -> dict[str, float]:
    """The mean accuracy Nshot in [0, 1] over the seeds, and its standard deviation, for each N."""
    accuracies = least_squares_accuracies(train, test, num_classes, shots, seeds, (l2,))
    values = {}
    for (count, _), of_seeds in accuracies.items():
        row = _row(count, LEAST_SQUARES, of_seeds)
        values[f'{count}shot'] = row['accuracy']
        if row['deviation'] is not None:
            values[f'{count}shot_deviation'] = row['deviation']
    return values


def compare(
    train: Features,
    test: Features,
    num_classes: int,
    shots: Sequence[int],
    seeds: int,
    l2: tuple[float, ...],
) -> Iterator[dict[str, Any]]:
    """Yields a row per method for each number of shots, then for all training examples.

    Every row has `shots` (None for all), `method`, `l2` (None for other methods than least
    squares), `accuracies` in [0, 1] of the seeds, their mean `accuracy` and `deviation`, the sample
    standard deviation (None for one seed).
    """
    squares = least_squares_accuracies(train, test, num_classes, shots, seeds, l2)
    for count in shots:
        for value in l2:
            yield _row(count, LEAST_SQUARES, squares[count, value], value)
        draws = [draw(train, num_classes, count, seed) for seed in range(seeds)]
        for name, method in OTHERS.items():
            accuracies = [
                _accuracy(method(examples, test.values, num_classes), test) for examples in draws
            ]
            yield _row(count, name, accuracies)
    scores_by_l2 = probes.least_squares(train, test.values, num_classes, l2)
    for value, scores in zip(l2, scores_by_l2, strict=True):
        yield _row(None, LEAST_SQUARES, [_accuracy(scores, test)], value)
    for name, method in (OTHERS | {LINEAR_PROBE: probes.linear_probe}).items():
        yield _row(None, name, [_accuracy(method(train, test.values, num_classes), test)])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of `compare` as a table, with a line per number of shots and a column per method."""
    cells = {(row['shots'], _column(row)): _percent(row) for row in rows}
    columns = list(dict.fromkeys(map(_column, rows)))
    lines = [['shots', *columns]]
    for count in dict.fromkeys(row['shots'] for row in rows):
        label = 'all' if count is None else str(count)
        lines.append([label, *(cells.get((count, column), '') for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return '\n'.join(
        '  '.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _accuracy(scores, test):
    return float(np.mean(scores.argmax(axis=1) == test.labels))


def _row(shots, method, accuracies, l2=None):
    deviation = None
    if len(accuracies) > 1:
        deviation = float(np.std(accuracies, ddof=1))
    return {
        'shots': shots,
        'method': method,
        'l2': l2,
        'accuracy': float(np.mean(accuracies)),
        'deviation': deviation,
        'accuracies': accuracies,
    }


def _column(row):
    if row['l2'] is None:
        return row['method']
    return f'{row["method"]}, L2 {row["l2"]:g}'


def _percent(row):
    percent = f'{100 * row["accuracy"]:.2f}'
    if row['deviation'] is None:
        return percent
    return f'{percent} ± {100 * row["deviation"]:.2f}'
