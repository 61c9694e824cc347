"""Groups of photos that show the same thing: copies, near copies, crops of one photo."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

# Two photos of one class count as near duplicates from this cosine similarity of their frozen
# features, without the mean of all photos and without the mean of their class.
# docs/lab-notes/near-duplicates.md has the measurements.
SIMILAR_IN_CLASS = 0.7
# Other photos count as near duplicates from this similarity, without the mean of all photos.
SIMILAR = 0.97
_LARGE_CLASS = 8  # photos of a class whose mean is meaningful
_ROWS = 1024  # of similarities in memory at once


def near_pairs(
    features: Float[np.ndarray, 'images features'], targets: Bool[np.ndarray, 'images classes']
) -> list[tuple[int, int, float]]:
    """All pairs of images that seem to show the same thing.

    Photos of one class are alike. Their features are compared without the mean of the class.

    Args:
      features: one row for each image.
      targets: whether each image shows each class.

    Returns:
      (first, second, similarity) with first < second, in the order of the images. The similarity is
      the cosine of what differs from the mean of all images.
    """
    centred = _directions(features - features.mean(axis=0))
    sets = _sets_of_labels(targets)
    sizes = np.bincount(sets)[sets]
    in_class = _directions(features - _class_means(features, sets))
    pairs = []
    for start in range(0, len(features), _ROWS):
        rows = slice(start, start + _ROWS)
        similarity = centred[rows] @ centred.T
        similarity_in_class = in_class[rows] @ in_class.T
        is_alike = np.minimum(similarity, similarity_in_class) >= SIMILAR_IN_CLASS
        has_mean = sizes[rows, None] >= _LARGE_CLASS
        is_of_one_class = (sets[rows, None] == sets) & has_mean
        is_near = np.where(is_of_one_class, is_alike, similarity >= SIMILAR)
        for row, column in np.argwhere(is_near).tolist():
            first = start + row
            if first < column:
                pairs.append((first, column, float(similarity[row, column])))
    return pairs


def _directions(vectors):
    """Vectors of length 1; 0 stays 0."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def _sets_of_labels(targets):
    """A number for each image, equal for images with the same labels."""
    _, sets = np.unique(targets, axis=0, return_inverse=True)
    return sets.reshape(-1)  # NumPy 2.0 has another shape


def _class_means(features, sets):
    """For each image, the mean of the images with the same labels."""
    sums = np.zeros((sets.max() + 1, features.shape[1]))
    np.add.at(sums, sets, features)
    return (sums / np.bincount(sets)[:, None])[sets]


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
