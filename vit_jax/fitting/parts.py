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
      UserError: if a class has too few photos for all parts, or if no photo is left for a part
        because too many photos show the same thing.
    """
    require_enough(photos)
    missing = _missing_splits(photos)
    if not missing:
        return [row._replace(split=row.split or TRAIN) for row in photos.rows]
    is_open = np.array([_may_train(row) for row in photos.rows])
    rows = [row for row in photos.rows if _may_train(row)]
    targets = targets_of(rows, photos.class_names)
    share = min(max(_WANTED / len(rows), _SMALLEST), _LARGEST)
    shares = [1 - share * len(missing), *[share] * len(missing)]
    part = grouped_split.cut(targets, groups[is_open], shares, at_least=1, seed=seed)
    names = [TRAIN, *missing]
    _require_photos_in(names, part, len(np.unique(groups[is_open])))
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


def require_enough(photos: Collection) -> None:
    """Check that there are photos to train, to choose the model, and to tell how good it is.

    Raises:
      UserError: if there is no photo to train, or if a class has too few photos for all parts.
    """
    rows = [row for row in photos.rows if _may_train(row)]
    if not rows:
        raise UserError(
            f'All photos are of the split {" or ".join(photos.splits())}: expected photos of '
            f'{TRAIN} as well. Give the photos that train the split {TRAIN}, or no split: the '
            'missing splits are then cut from them.',
            kind='missing',
            value=photos.splits(),
        )
    roles = [TRAIN, *_missing_splits(photos)]
    counts = targets_of(rows, photos.class_names).sum(axis=0)
    few = [f'{photos.class_names[k]} {counts[k]}' for k in np.flatnonzero(counts < len(roles))]
    if few:
        raise UserError(
            f'{len(few)} of {len(photos.class_names)} classes have too few photos that can be read '
            f'and train: {some(few)}. Expected at least {counted(len(roles), "photo")} of each '
            f'class, one for each of {", ".join(roles)}. Add photos, or remove the class.',
            kind='content',
            value=few,
        )


def _missing_splits(photos):
    present = photos.splits()
    return [split for split in (VALIDATION, TEST) if split not in present]


def _may_train(row):
    return row.split in ('', TRAIN)


def _require_photos_in(names, part, num_groups):
    empty = [name for k, name in enumerate(names) if not (part == k).any()]
    if empty:
        raise UserError(
            f'There is no photo for {" and ".join(empty)}: the {len(part)} photos show only '
            f'{counted(num_groups, "thing")}, because copies and near copies count once. Add '
            'photos of other things, or give fit photos with splits.',
            kind='content',
            value=empty,
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
            '%s of different splits seem to show the same thing, and the accuracy is too high if '
            'they do:\n  %s\n'
            'Remove one photo of each pair, or give fit photos without splits, which it cuts '
            'itself.',
            counted(len(across), 'pair'),
            some(lines, 10, between='\n  '),
        )
    return across
