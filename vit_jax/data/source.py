"""The interface of a source of examples, and a wrapper that changes parts of another source."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64

from vit_jax.data.host_tensorflow import tf
from vit_jax.data.sequential import Pieces

Item = dict[str, tf.Tensor]


class Source(Protocol):
    """One split of a data set.

    A source with random access has `fetch`. A source that is read in sequence has `pieces` instead:
    the runs of records in its files. Its items are {'record': serialised example}.

    Attributes:
      labels: the label of each example; None if labels are known only when examples are read.
      label_lists: the labels of each example of a multi-label source, where they are known.
      stratified: whether slices of the split have every class in proportion.
      unreadable: the reason for each example that is known to be broken from the start, by index.
    """

    num_examples: int
    class_names: tuple[str, ...]
    multi_label: bool
    pieces: Pieces | None
    labels: Int32[np.ndarray, ' num_examples'] | None
    label_lists: Sequence[Sequence[int]] | None
    stratified: bool
    unreadable: dict[int, str]

    def fetch(self, indices: Int64[tf.Tensor, ' k']) -> Item:
        """The items of k examples, as a dict of tensors [k]."""

    def load(self, item: Item) -> tuple[tf.Tensor, tf.Tensor]:
        """The encoded image (string scalar) and the label of one item, inside the input graph.

        The label is an int32 scalar or, if `multi_label`, float32 [classes] with values 0 and 1.
        """

    def name_of(self, index: int) -> str:
        """The name of an example in messages."""

    def restore(self, index: int) -> bool:
        """Rebuilds the file that data/cached.py keeps for an example, if it is damaged.

        Returns whether it rebuilt the file; False for a source without such files.
        """

    def listing(self) -> Iterator[tuple[str, str, int]]:
        """Yields (class, name, size in bytes) of every image of the split, in index order.

        The listing shows whether the images are still the same; see workdir/data_record.py. Names
        do not depend on the location of a directory. TFDS sets list their files, as described by
        their metadata. A subset of a split has the listing of the whole split.
        """


class WrappedSource:
    """A source that forwards to another one, its `source`. Subclasses override some parts."""

    def __init__(self, source: Source):
        self.source = source
        self.num_examples = source.num_examples
        self.class_names = source.class_names
        self.multi_label = source.multi_label
        self.pieces = source.pieces
        self.labels = source.labels
        self.label_lists = source.label_lists
        self.stratified = source.stratified
        self.unreadable = source.unreadable

    def fetch(self, indices: Int64[tf.Tensor, ' k']) -> Item:
        return self.source.fetch(indices)

    def load(self, item: Item) -> tuple[tf.Tensor, tf.Tensor]:
        return self.source.load(item)

    def name_of(self, index: int) -> str:
        return self.source.name_of(index)

    def restore(self, index: int) -> bool:
        return self.source.restore(index)

    def listing(self) -> Iterator[tuple[str, str, int]]:
        return self.source.listing()


def has_local_files(source: Source) -> bool:
    """Whether the examples of a source are files on this machine."""
    if source.pieces is not None:
        return False
    return 'path' in source.fetch(tf.zeros([0], tf.int64)) and '://' not in source.name_of(0)
