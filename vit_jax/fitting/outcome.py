"""How good the model is, where it is wrong, and which labels may be."""

import csv
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from vit_jax.data import table_cells
from vit_jax.evaluators import average_precision, intervals
from vit_jax.evaluators.calibration import calibration
from vit_jax.files import writing
from vit_jax.fitting import probe

log = logging.getLogger(__name__)

_LISTED = 50  # confident mistakes


class Mistake(NamedTuple):
    """A photo whose predicted class is not its label."""

    file: str
    label: str
    predicted: str
    confidence: float


class Outcome(NamedTuple):
    """The scores of a model on photos that neither trained nor chose it.

    Attributes:
      accuracy: from 0 to 1. Where photos have several labels, a prediction is right if it is one.
      interval: its 95 % confidence interval.
      num_images: photos that are scored.
      mean_average_precision: None where photos have one label.
      classes: (name, recall or average precision, number of photos), the worst class first.
      confusion: photos by (label, predicted class); None where photos have several labels.
      calibration_error: the expected calibration error.
      mistakes: the most confident first.
    """

    accuracy: float
    interval: tuple[float, float]
    num_images: int
    mean_average_precision: float | None
    classes: list[tuple[str, float, int]]
    confusion: list[list[int]] | None
    calibration_error: float
    mistakes: list[Mistake]

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return self._asdict() | {'mistakes': [mistake._asdict() for mistake in self.mistakes]}


def score(
    files: Sequence[str],
    targets: Bool[np.ndarray, 'images classes'],
    logits: Float[np.ndarray, 'images classes'],
    class_names: Sequence[str],
    multi_label: bool,
) -> Outcome:
    """Score calibrated logits."""
    values = probe.probabilities(logits, multi_label)
    predicted = values.argmax(axis=1)
    confidence = values.max(axis=1)
    is_right = targets[np.arange(len(targets)), predicted]
    order = np.argsort(-confidence, kind='stable')
    wrong = [k for k in order.tolist() if not is_right[k]]
    mistakes = [
        Mistake(
            files[k],
            ';'.join(class_names[label] for label in np.flatnonzero(targets[k])),
            class_names[predicted[k]],
            float(confidence[k]),
        )
        for k in wrong[:_LISTED]
    ]
    confusion = None
    precision = None
    if multi_label:
        by_class = average_precision.by_class(logits.astype(np.float32), targets)
        precision = float(np.nanmean(by_class))
        counts = targets.sum(axis=0)
    else:
        matrix = np.zeros((len(class_names), len(class_names)), np.int64)
        np.add.at(matrix, (targets.argmax(axis=1), predicted), 1)
        confusion = matrix.tolist()
        counts = matrix.sum(axis=1)
        by_class = np.diag(matrix) / np.maximum(counts, 1)
    rows = [(class_names[k], float(by_class[k]), int(counts[k])) for k in range(len(class_names))]
    error = calibration(confidence.astype(np.float32), is_right)['expected_error']
    return Outcome(
        float(is_right.mean()),
        intervals.wilson(int(is_right.sum()), len(is_right)),
        len(is_right),
        precision,
        sorted((row for row in rows if row[2]), key=lambda row: row[1]),
        confusion,
        float(error),
        mistakes,
    )


def report(outcome: Outcome) -> None:
    """Log the outcome: the worst classes first."""
    width = max(len(name) for name, *_ in outcome.classes)
    lines = [
        f'  {name:<{width}}  {100 * value:6.2f} %  of {count}'
        for name, value, count in outcome.classes[:20]
    ]
    log.info('Per class, the worst first:\n%s', '\n'.join(lines))
    low, high = outcome.interval
    log.info(
        'Accuracy %.2f %% on %d photos that the training has not seen (95 %% confidence interval '
        '%.1f to %.1f %%); calibration error %.2f %%',
        100 * outcome.accuracy,
        outcome.num_images,
        100 * low,
        100 * high,
        100 * outcome.calibration_error,
    )
    if outcome.mean_average_precision is not None:
        log.info('Mean average precision %.2f %%', 100 * outcome.mean_average_precision)


def write_tables(outcome: Outcome, class_names: Sequence[str], folder: str) -> None:
    """Write mistakes.csv, and confusion.csv where photos have one label."""
    path = os.path.join(folder, 'mistakes.csv')
    with (
        writing(path) as temporary,  # names of files may be in no encoding
        open(temporary, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file,
    ):
        table_cells.write(file, Mistake._fields, outcome.mistakes)
    if outcome.confusion is None:
        return
    path = os.path.join(folder, 'confusion.csv')
    with writing(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file)
        writer.writerow(['label', *map(table_cells.cell, class_names)])
        for name, row in zip(class_names, outcome.confusion, strict=True):
            writer.writerow([table_cells.cell(name), *row])
