"""Groups of photos that show the same thing: copies, near copies, crops of one photo."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int

# Cosine similarity of two photos' frozen features from which they count as near duplicates. It is
# measured in docs/lab-notes/near-duplicates.md.
SIMILAR = 0.93
_ROWS = 1024  # of similarities in memory at once


def near_pairs(
    features: Float[np.ndarray, 'images features'], threshold: float = SIMILAR
) -> list[tuple[int, int, float]]:
    """All pairs of images whose features are similar.

    Args:
      features: one row for each image; their lengths do not matter.
      threshold: the lowest cosine similarity of a pair.

    Returns:
      (first, second, similarity) with first < second, in the order of the images.
    """
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / np.maximum(lengths, 1e-12)
    pairs = []
    for start in range(0, len(directions), _ROWS):
        similarity = directions[start : start + _ROWS] @ directions.T
        for row, column in np.argwhere(similarity >= threshold).tolist():
            first = start + row
            if first < column:
                pairs.append((first, column, float(similarity[row, column])))
    return pairs


def equal_pairs(checksums: Sequence[str]) -> list[tuple[int, int]]:
    """(first, other) for every image whose file has the bytes of an earlier one."""
    first_with: dict[str, int] = {}
    pairs = []
    for index, checksum in enumerate(checksums):
        if checksum in first_with:
            pairs.append((first_with[checksum], index))
        else:
            first_with[checksum] = index
    return pairs


def groups_of_pairs(count: int, pairs: Iterable[tuple[int, int]]) -> Int[np.ndarray, ' images']:
    """The group of each of `count` images: images that a chain of pairs joins have one group.

    Returns:
      The lowest index in the group of each image, which is its own index without a pair.
    """
    parent = list(range(count))

    def root(index):
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for first, second in pairs:
        low, high = sorted((root(first), root(second)))
        parent[high] = low
    return np.array([root(index) for index in range(count)], np.int64)


def pairs_of_names(names: Sequence[str]) -> list[tuple[int, int]]:
    """(first, other) for images with the same name of a group; '' is no group."""
    pairs = equal_pairs(names)
    return [(first, other) for first, other in pairs if names[first]]
