"""Which photos train, which choose, and which tell how good the model is."""

import logging
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from vit_jax.data import grouped_split
from vit_jax.data.photo_table import Row
from vit_jax.errors import UserError, counted, some
from vit_jax.fitting.collect import TEST, TRAIN, VALIDATION, Collection

log = logging.getLogger(__name__)

# Photos that a part that is cut should have, and the share of all photos that it may have for it.
_WANTED = 150
_SMALLEST, _LARGEST = 0.1, 0.2


def targets_of(
    rows: Sequence[Row], class_names: Sequence[str]
) -> Bool[np.ndarray, 'images classes']:
    """Whether each photo shows each class."""
    number = {name: k for k, name in enumerate(class_names)}
    targets = np.zeros((len(rows), len(class_names)), bool)
    for index, row in enumerate(rows):
        for label in row.labels:
            targets[index, number[label]] = True
    return targets


def with_splits(photos: Collection, groups: Int[np.ndarray, ' images'], seed: int = 0) -> list[Row]:
    """The rows, each with a split.

    A split that is there stays. `val` and `test` are cut from `train` where they are missing, with
    every class in proportion. Photos of one group stay together.

    Raises:
      UserError: if a class has too few photos for all parts.
    """
    present = photos.splits()
    missing = [split for split in (VALIDATION, TEST) if split not in present]
    if not missing:
        return [row._replace(split=row.split or TRAIN) for row in photos.rows]
    is_open = np.array([row.split in ('', TRAIN) for row in photos.rows])
    rows = [row for row, may_be_cut in zip(photos.rows, is_open, strict=True) if may_be_cut]
    targets = targets_of(rows, photos.class_names)
    _require_enough(targets, photos.class_names, 1 + len(missing))
    share = min(max(_WANTED / len(rows), _SMALLEST), _LARGEST)
    shares = [1 - share * len(missing), *[share] * len(missing)]
    part = grouped_split.cut(targets, groups[is_open], shares, at_least=1, seed=seed)
    names = [TRAIN, *missing]
    cut_rows = iter([row._replace(split=names[k]) for row, k in zip(rows, part, strict=True)])
    result = [
        next(cut_rows) if may_be_cut else row
        for row, may_be_cut in zip(photos.rows, is_open, strict=True)
    ]
    log.info(
        'There is no split %s: cut %s from the %d photos of train, every class in proportion',
        ' and no split '.join(missing),
        ' and '.join(
            f'{counted((part == k + 1).sum(), "photo")} for {missing[k]}'
            for k in range(len(missing))
        ),
        len(rows),
    )
    return result


def _require_enough(targets, class_names, parts):
    counts = targets.sum(axis=0)
    few = [f'{class_names[k]} {counts[k]}' for k in np.flatnonzero(counts < parts)]
    if few:
        raise UserError(
            f'{len(few)} of {len(class_names)} classes have fewer than {parts} photos: '
            f'{some(few)}. One photo trains, one chooses the model and one tells how good it is: '
            f'expected at least {parts} photos of each class. Add photos, or remove the class.',
            kind='content',
            value=few,
        )


def check_groups(
    rows: Sequence[Row], pairs: Sequence[tuple[int, int, float]]
) -> list[tuple[str, str, float]]:
    """Find photos of different splits that show the same thing, and warn of them.

    Args:
      rows: with splits.
      pairs: (first, second, similarity) of near duplicates.

    Returns:
      (file, file, similarity) of the pairs between different splits.
    """
    across = [
        (rows[first].file, rows[second].file, similarity)
        for first, second, similarity in pairs
        if rows[first].split != rows[second].split
    ]
    if across:
        lines = [f'{first} and {second}' for first, second, _ in across]
        log.warning(
            '%s of different splits show the same thing, so that the accuracy is too high:\n  %s\n'
            'Remove one photo of each pair, or give fit photos without splits, which it cuts '
            'itself.',
            counted(len(across), 'pair'),
            some(lines, 10, between='\n  '),
        )
    return across
