"""Photos whose label is probably wrong, by the predictions of models that did not train on them.

Northcutt et al., "Confident Learning", arXiv 1911.00068, rank examples by the
probability that a model of other examples gives their label. The models here are linear
classifiers of frozen features, one for each fold, so that the whole ranking takes seconds.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from vit_jax.data import table_cells
from vit_jax.files import writing

FOLDS = 5


class Suspect(NamedTuple):
    """A photo and its prediction by the model of the other folds.

    Attributes:
      file: its path.
      label: its class in the data.
      confidence: the probability of this class, from 0 to 1.
      predicted: the most probable other class.
      predicted_confidence: the probability of that class.
    """

    file: str
    label: str
    confidence: float
    predicted: str
    predicted_confidence: float

    def margin(self) -> float:
        """How far the label is behind the other class: at -1 the label is certain, at 1 wrong."""
        return self.predicted_confidence - self.confidence


def out_of_fold(
    features: Float[np.ndarray, 'images features'],
    targets: Bool[np.ndarray, 'images classes'],
    folds: Int[np.ndarray, ' images'],
    classify: Callable[..., Float[np.ndarray, 'queries classes']],
) -> Float[np.ndarray, 'images classes']:
    """Probabilities of every image by a classifier that trained on the other folds.

    Args:
      features: frozen features.
      targets: whether an image has a class as its label.
      folds: the number of the fold of each image.
      classify: (features, targets, queries) -> probabilities of the queries.
    """
    probabilities = np.zeros(targets.shape)
    for fold in np.unique(folds):
        inside = folds == fold
        probabilities[inside] = classify(features[~inside], targets[~inside], features[inside])
    return probabilities


def ranked(
    files: Sequence[str],
    targets: Bool[np.ndarray, 'images classes'],
    probabilities: Float[np.ndarray, 'images classes'],
    class_names: Sequence[str],
) -> list[Suspect]:
    """All photos with a label, the most suspicious first.

    A photo with several labels has one entry, for the label with the lowest probability.
    """
    suspects = []
    for index, file in enumerate(files):
        of_image = probabilities[index]
        is_label = targets[index]
        if not is_label.any():
            continue
        label = int(np.where(is_label, of_image, np.inf).argmin())
        other = int(np.where(is_label, -np.inf, of_image).argmax())
        suspects.append(
            Suspect(
                file,
                class_names[label],
                float(of_image[label]),
                class_names[other],
                float(of_image[other]),
            )
        )
    return sorted(suspects, key=lambda suspect: -suspect.margin())


def write(path: str, suspects: Sequence[Suspect]) -> None:
    """Write a CSV file with one row for each photo, in the order of `suspects`.

    Raises:
      UserError: if the file cannot be written.
    """
    with (
        writing(path) as temporary,
        open(temporary, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file,
    ):
        table_cells.write(file, Suspect._fields, suspects)
