"""Scores of single classes: the worst class, and the classes without images."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from vit_jax.errors import some
from vit_jax.evaluators import average_precision

LISTED = 3  # largest number of names of classes without images in one text
LONGEST = 60  # largest number of characters of a name


@dataclasses.dataclass(frozen=True)
class PerClass:
    """Scores and numbers of images of all classes.

    Attributes:
      names: the names of the classes.
      scores: the accuracy in [0, 1], or the average precision for images with several labels. The
        score of a class without images has no meaning.
      num_examples: number of images of each class.
    """

    names: Sequence[str]
    scores: Float[np.ndarray, ' classes']
    num_examples: Float[np.ndarray, ' classes']

    def without_images(self) -> list[str]:
        """The names of the classes that have no images."""
        return [self.names[k] for k in np.flatnonzero(self.num_examples == 0).tolist()]

    def missing(self) -> str:
        """The text of `missing_classes`, '' if every class has images."""
        return missing_classes(self.without_images(), len(self.names))

    def count(self) -> str:
        """The number of classes with images: '17 classes' or '16 of 17 classes'."""
        total = len(self.names)
        scored = total - len(self.without_images())
        return f'{total} classes' if scored == total else f'{scored} of {total} classes'

    def lowest(self) -> tuple[str, float, int] | None:
        """Name, score and number of images of the class with the lowest score.

        Ties go to the class with the most images. None if no class has images.
        """
        is_scored = (self.num_examples > 0) & ~np.isnan(self.scores)
        scored = np.flatnonzero(is_scored).tolist()
        if not scored:
            return None
        k = min(scored, key=lambda k: (self.scores[k], -self.num_examples[k]))
        return _shortened(self.names[k]), float(self.scores[k]), int(self.num_examples[k])

    def worst(self) -> str:
        """The class with the lowest score in words; '' if no class has images."""
        lowest = self.lowest()
        if lowest is None:
            return ''
        name, score, num_examples = lowest
        return f"worst class '{name}': {100 * score:.2f} % of {num_examples} images"


def from_sums(sums: Mapping[str, Any], names: Sequence[str]) -> PerClass | None:
    """The scores from the totals of evaluator.total; None if the model predicts no classes."""
    if 'class_count' in sums:
        count = sums['class_count']
        return PerClass(names, sums['class_correct'] / np.maximum(count, 1), count)
    rows = sums.get('rows', {})
    if 'logits' in rows and rows['label'].ndim == 2:
        precision = average_precision.by_class(rows['logits'], rows['label'])
        return PerClass(names, precision, rows['label'].sum(axis=0))
    return None


def from_table(classes: Mapping[str, Mapping[str, Any]]) -> PerClass:
    """The scores from the entry `classes` of the result of scoring.classes."""
    scores = [row.get('accuracy', row.get('average_precision')) for row in classes.values()]
    return PerClass(
        list(classes),
        np.array([np.nan if score is None else score for score in scores]),
        np.array([row['num_examples'] for row in classes.values()]),
    )


def missing_classes(without: Sequence[str], total: int) -> str:
    """'no images of 1 of 17 classes: squirrel monkey' for classes without images, '' for none."""
    if not without:
        return ''
    names = some([_shortened(name) for name in without], LISTED)
    return f'no images of {len(without)} of {total} classes: {names}'


def _shortened(name):
    return name if len(name) <= LONGEST else f'{name[: LONGEST - 3]}...'
