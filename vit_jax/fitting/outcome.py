"""How good the model is, and where it is wrong."""

import csv
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

MISTAKES, CONFUSION = 'mistakes.csv', 'confusion.csv'
_LISTED = 50  # confident mistakes


class Mistake(NamedTuple):
    """A photo whose predicted class is not its label.

    Attributes:
      file: its path.
      label: its class, or its classes with semicolons between them.
      label_confidence: the probability of its label, the largest one of several; 0 without a label.
      predicted: the most probable class.
      confidence: the probability of this class.
    """

    file: str
    label: str
    label_confidence: float
    predicted: str
    confidence: float


class ClassScore(NamedTuple):
    """The score of one class.

    Attributes:
      name: of the class.
      score: its recall; the average precision where photos have several labels.
      num_images: its photos among the scored ones.
      precision: the share of the predictions of this class that are right; None without such a
        prediction, and where photos have several labels.
    """

    name: str
    score: float
    num_images: int
    precision: float | None


class Outcome(NamedTuple):
    """The scores of a model on photos that neither trained nor chose it.

    Attributes:
      accuracy: from 0 to 1. Where photos have several labels, a prediction is right if it is one.
      interval: its 95 % confidence interval.
      num_images: photos that are scored.
      mean_average_precision: None where photos have one label.
      classes: with photos, the worst class first.
      confusion: photos by (label, predicted class); None where photos have several labels.
      temperature: by which the logits are divided.
      calibration_error: the expected calibration error.
      calibration_error_before: the same without the temperature.
      bins: of the reliability diagram, as in evaluators.calibration.
      mistakes: the most confident first.
    """

    accuracy: float
    interval: tuple[float, float]
    num_images: int
    mean_average_precision: float | None
    classes: list[ClassScore]
    confusion: list[list[int]] | None
    temperature: float
    calibration_error: float
    calibration_error_before: float
    bins: list[dict[str, Any]]
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
    temperature: float = 1.0,
) -> Outcome:
    """Score calibrated logits.

    Args:
      files: the path of each photo.
      targets: whether a photo shows a class.
      logits: of the photos, divided by the temperature.
      class_names: in the order of their numbers.
      multi_label: whether photos may have several labels.
      temperature: by which the logits are divided.
    """
    values = probe.probabilities(logits, multi_label)
    predicted = values.argmax(axis=1)
    is_right = targets[np.arange(len(targets)), predicted]
    confusion = None
    mean_average_precision = None
    if multi_label:
        precision = average_precision.by_class(logits.astype(np.float32), targets)
        mean_average_precision = float(np.nanmean(precision))
        classes = _precisions_of_classes(precision, targets, class_names)
    else:
        matrix = np.zeros((len(class_names), len(class_names)), np.int64)
        np.add.at(matrix, (targets.argmax(axis=1), predicted), 1)
        confusion = matrix.tolist()
        classes = _recalls_of_classes(matrix, class_names)
    calibrated = calibration(values.max(axis=1).astype(np.float32), is_right)
    before = probe.probabilities(logits * temperature, multi_label)
    return Outcome(
        accuracy=float(is_right.mean()),
        interval=intervals.wilson(int(is_right.sum()), len(is_right)),
        num_images=len(is_right),
        mean_average_precision=mean_average_precision,
        classes=sorted((row for row in classes if row.num_images), key=lambda row: row.score),
        confusion=confusion,
        temperature=temperature,
        calibration_error=calibrated['expected_error'],
        calibration_error_before=calibration(before.max(axis=1).astype(np.float32), is_right)[
            'expected_error'
        ],
        bins=calibrated['bins'],
        mistakes=_mistakes(files, targets, values, class_names),
    )


def _precisions_of_classes(precision, targets, class_names):
    counts = targets.sum(axis=0)
    return [
        ClassScore(name, float(precision[k]), int(counts[k]), None)
        for k, name in enumerate(class_names)
    ]


def _recalls_of_classes(matrix, class_names):
    """The scores of all classes from a confusion matrix [label, predicted]."""
    rows = []
    for k, name in enumerate(class_names):
        labelled = int(matrix[k].sum())
        predicted = int(matrix[:, k].sum())
        precision = None
        if predicted:
            precision = float(matrix[k, k] / predicted)
        rows.append(ClassScore(name, float(matrix[k, k] / max(labelled, 1)), labelled, precision))
    return rows


def _mistakes(files, targets, values, class_names):
    """The most confident mistakes."""
    predicted = values.argmax(axis=1)
    confidence = values.max(axis=1)
    order = np.argsort(-confidence, kind='stable')
    wrong = [k for k in order.tolist() if not targets[k, predicted[k]]]
    return [
        Mistake(
            files[k],
            ';'.join(class_names[label] for label in np.flatnonzero(targets[k])),
            float(values[k][targets[k]].max(initial=0.0)),
            class_names[predicted[k]],
            float(confidence[k]),
        )
        for k in wrong[:_LISTED]
    ]


def lines(outcome: Outcome, split: str) -> list[str]:
    """The outcome in words: the score with its interval, the worst classes, the calibration.

    Args:
      outcome: the scores.
      split: the name of the split of the scored photos.
    """
    low, high = outcome.interval
    interval = f'95 % confidence interval {100 * low:.1f} to {100 * high:.1f} %'
    photos = f'{outcome.num_images} photos of {split}, which neither trained nor chose the model'
    if outcome.mean_average_precision is None:
        first = [f'Accuracy {100 * outcome.accuracy:.2f} % ({interval}) on {photos}']
    else:
        first = [
            f'Mean average precision {100 * outcome.mean_average_precision:.2f} % on {photos}',
            f'The most probable class is right for {100 * outcome.accuracy:.2f} % ({interval})',
        ]
    worst = [
        f"'{row.name}' {100 * row.score:.1f} % of {row.num_images}" for row in outcome.classes[:3]
    ]
    return [
        *first,
        f'Worst classes: {", ".join(worst)}',
        f'Expected calibration error {100 * outcome.calibration_error:.2f} %, '
        f'{100 * outcome.calibration_error_before:.2f} % before the temperature '
        f'{outcome.temperature:.3f}',
    ]


def write_tables(outcome: Outcome, class_names: Sequence[str], folder: str) -> None:
    """Write mistakes.csv, and confusion.csv where photos have one label."""
    path = os.path.join(folder, MISTAKES)
    with (
        writing(path) as temporary,  # names of files may be in no encoding
        open(temporary, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file,
    ):
        table_cells.write(file, Mistake._fields, outcome.mistakes)
    if outcome.confusion is None:
        return
    path = os.path.join(folder, CONFUSION)
    with writing(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
        writer = csv.writer(file)
        writer.writerow(['label', *map(table_cells.cell, class_names)])
        for name, row in zip(class_names, outcome.confusion, strict=True):
            writer.writerow([table_cells.cell(name), *row])
