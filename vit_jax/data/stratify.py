"""An order of images in which every slice has each class in proportion."""

import numpy as np
from jaxtyping import Int, Int64


def stratified_order(labels: Int[np.ndarray, ' examples']) -> Int64[np.ndarray, ' examples']:
    """The indices of all examples, in an order whose slices are stratified.

    Example k of a class with n examples has the place (k + 1/2) / n between 0 and 1. The first
    example of a class has the place 0, the last one 1. Examples are sorted by place.

    A slice has each class in proportion, rounded up or down, as far as the number of examples in
    the slice allows. The order begins with one example of each class. It ends with one example of
    each class that has two or more. Both sides of a cut therefore have every class of two or more
    examples, unless a side has fewer examples than there are classes.

    Args:
      labels: the class of each example. Examples of one class keep their order, and so do examples
        of several classes at the same place.
    """
    by_class = np.argsort(labels, kind='stable')
    class_sizes = np.bincount(labels)
    size = class_sizes[labels[by_class]]
    first_of_class = np.cumsum(class_sizes) - class_sizes
    rank = np.arange(len(labels)) - first_of_class[labels[by_class]]
    place = (rank + 0.5) / size
    place[rank == size - 1] = 1.0
    place[rank == 0] = 0.0  # after the line above: an only example counts as the first
    return by_class[np.lexsort((by_class, place))]
