"""Cut images into parts: each class in proportion, and no group in two parts.

Sechidis et al., "On the stratification of multi-label data" (ECML PKDD 2011), distribute examples
one by one to the part that needs their labels most. This does the same with groups.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int


def cut(
    targets: Bool[np.ndarray, 'images classes'],
    groups: Int[np.ndarray, ' images'],
    shares: Sequence[float],
    at_least: int = 0,
    seed: int = 0,
) -> Int[np.ndarray, ' images']:
    """The part of each image.

    Args:
      targets: whether an image shows a class. An image may show several.
      groups: images with equal numbers stay together.
      shares: of the images that each part is to have; they sum to one.
      at_least: images of each class that every part after the first is to have, where the class
        has enough for all parts.
      seed: decides between parts that need a group equally.

    Returns:
      The number of a part for each image. Every part has about its share of each class. The rarest
      classes are distributed first, because they leave the least choice.
    """
    generator = np.random.default_rng(seed)
    names, group_of_image = np.unique(groups, return_inverse=True)
    counts = np.zeros((len(names), targets.shape[1]), np.int64)
    np.add.at(counts, group_of_image, targets.astype(np.int64))
    sizes = np.bincount(group_of_image)
    wanted = np.outer(shares, targets.sum(axis=0)).astype(np.float64)
    has_enough = targets.sum(axis=0) >= len(shares) * at_least
    wanted[1:] = np.where(has_enough, np.maximum(wanted[1:], at_least), wanted[1:])
    wanted[0] = targets.sum(axis=0) - wanted[1:].sum(axis=0)
    wanted_images = np.asarray(shares) * len(targets)
    part_of_group = np.full(len(names), -1)
    for group in _order(counts, sizes, generator):
        part = _neediest(wanted, wanted_images, counts[group], generator)
        part_of_group[group] = part
        wanted[part] -= counts[group]
        wanted_images[part] -= sizes[group]
    return part_of_group[group_of_image]


def _order(counts, sizes, generator):
    """The groups: those with the rarest class first, and large ones before small ones."""
    frequency = counts.sum(axis=0)
    rarest = np.where(counts > 0, frequency, np.iinfo(np.int64).max).min(axis=1)
    tie = generator.permutation(len(sizes))
    return np.lexsort((tie, -sizes, rarest))


def _neediest(wanted, wanted_images, counts, generator):
    """The part that lacks the most images of the rarest class of a group."""
    shown = np.flatnonzero(counts)
    if not len(shown):
        return int(wanted_images.argmax())
    rarest = shown[wanted[:, shown].clip(min=0).sum(axis=0).argmin()]
    need = wanted[:, rarest]
    parts = np.flatnonzero(np.isclose(need, need.max()))
    parts = parts[np.isclose(wanted_images[parts], wanted_images[parts].max())]
    return int(generator.choice(parts))
