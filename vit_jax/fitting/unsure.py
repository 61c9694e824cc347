"""Photos to label next: the model is least certain about them.

With softmax the photos are in the order of margin sampling: the margin is the difference of the two
highest probabilities (Scheffer et al., "Active Hidden Markov Models for Information Extraction",
2001; Settles, "Active Learning Literature Survey", 2009, section 3.1). With independent classes the
margin is the smallest distance of a class's probability from 0.5 (uncertainty sampling, Lewis and
Gale, "A Sequential Algorithm for Training Text Classifiers", 1994).
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from vit_jax.data import photo_table, table_cells
from vit_jax.files import writing


class Unsure(NamedTuple):
    """A photo and the classes that the model cannot tell apart.

    Attributes:
      file: the absolute path.
      uncertainty: from 0 (certain) to 1 (the margin is 0).
      candidates: (class, probability) of the two most probable classes. With independent classes,
        the two classes whose probabilities are nearest to 0.5. One entry if there is one class.
      margin: between the two classes, from 0 to 1; with independent classes, the distance from 0.5,
        from 0 to 0.5.
    """

    file: str
    uncertainty: float
    candidates: tuple[tuple[str, float], ...]
    margin: float


def ranked(
    files: Sequence[str],
    probabilities: Float[np.ndarray, 'images classes'],
    class_names: Sequence[str],
    is_multi_label: bool,
) -> list[Unsure]:
    """Returns the photos, the least certain first; ties keep their order.

    A file that occurs several times has one entry.

    Args:
      files: the paths of the photos.
      probabilities: of the classes of each photo; at least two classes unless `is_multi_label`.
      class_names: the names of the classes.
      is_multi_label: whether each class has an independent probability (sigmoid).
    """
    probabilities = np.asarray(probabilities, np.float64)
    if is_multi_label:
        distances = np.abs(probabilities - 0.5)
        order = np.argsort(distances, axis=1, kind='stable')[:, :2]
        margins = distances.min(axis=1)
        uncertainties = 1 - 2 * margins
    else:
        order = np.argsort(-probabilities, axis=1, kind='stable')[:, :2]
        highest = np.take_along_axis(probabilities, order, axis=1)
        margins = highest[:, 0] - highest[:, 1]
        uncertainties = 1 - margins
    photos: dict[str, Unsure] = {}
    for index in np.argsort(margins, kind='stable'):
        file = os.path.abspath(files[index])
        if file in photos:
            continue
        candidates = tuple((class_names[k], float(probabilities[index, k])) for k in order[index])
        photos[file] = Unsure(file, float(uncertainties[index]), candidates, float(margins[index]))
    return list(photos.values())


def write(path: str, photos: Sequence[Unsure], is_multi_label: bool) -> None:
    """Write a table of photos whose column of labels is empty, in the order of `photos`.

    data/photo_table.py reads the table as soon as every row has a label.

    Args:
      path: the CSV file.
      photos: one row for each.
      is_multi_label: whether the column is `labels`, for several labels of an image, or `label`.

    Raises:
      UserError: if the file cannot be written.
    """
    label_column = photo_table.LABELS if is_multi_label else photo_table.LABEL
    header = [photo_table.FILE, label_column, *photo_table.NOTES]
    with (
        writing(path) as temporary,
        open(temporary, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file,
    ):
        table_cells.write(file, header, map(_cells, photos))


def _cells(photo):
    """The cells of a photo: a file, an empty label, and the columns of photo_table.NOTES."""
    candidates = [*photo.candidates, ('', '')][:2]
    cells = [photo.file, '', photo.uncertainty]
    for name, probability in candidates:
        cells += [name, probability]
    return [*cells, photo.margin]
