"""Nested subsets of a training split: a larger subset contains every smaller one."""

import numpy as np
from jaxtyping import Int64

from vit_jax.data import order, stratify
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.sequential import Pieces
from vit_jax.data.source import Source, WrappedSource
from vit_jax.errors import UserError

# The key of the permutation. Its numbers are arbitrary, but a change would change every subset.
_KEY = (1_523_766_341, -822_190_767, 417_089_203)


def subset(source: Source, size: str, split: str) -> Source:
    """The first examples of a permutation that depends only on the number of examples.

    A stratified source uses stratify.stratified_order instead, in which every class is in
    proportion. A source that is read in sequence uses the first records of each file, in proportion
    to its length: TFDS shuffled the records when it wrote them.

    Args:
      size: a number of examples such as '1000', a share such as '10%', or '' for all.
      split: the name of the split, for messages.

    Raises:
      UserError: if the subset is empty or larger than the split.
    """
    if not size:
        return source
    total = source.num_examples
    pieces = source.pieces
    count = round(float(size[:-1]) * total / 100) if size.endswith('%') else int(size)
    if not 1 <= count <= total:
        raise UserError(
            f'dataset.subset is {size}, or {count} images: expected 1 to {total}, the number of '
            f'images in {split}, or a share such as 10%.',
            kind='value',
            field='dataset.subset',
            value=size,
        )
    if source.stratified:
        assert source.labels is not None  # a stratified source has them
        return Subset(source, stratify.stratified_order(source.labels)[:count], None)
    if pieces is None:
        permuted = order.permute(tf.range(count, dtype=tf.int64), _KEY, total).numpy()
        return Subset(source, permuted, None)
    take = _numbers_in_proportion(pieces.take, count)
    first = np.cumsum(take) - take
    keep = take > 0
    shorter_pieces = Pieces(
        filename=pieces.filename[keep], skip=pieces.skip[keep], take=take[keep], first=first[keep]
    )
    indices = np.arange(count) + np.repeat(pieces.first - first, take)
    return Subset(source, indices, shorter_pieces)


def _numbers_in_proportion(sizes, count):
    """Numbers in proportion to `sizes` with the sum `count`; a larger count lowers no number."""

    def rounded(share):
        return np.minimum(sizes, np.floor(share * sizes + 0.5).astype(np.int64))

    low = 0.0
    high = 2.0
    for _ in range(100):  # until no floating-point number is between them
        middle = (low + high) / 2
        if rounded(middle).sum() <= count:
            low = middle
        else:
            high = middle
    numbers = rounded(low)
    still_missing = count - numbers.sum()
    numbers[np.flatnonzero(rounded(high) > numbers)[:still_missing]] += 1
    return numbers


class Subset(WrappedSource):
    """Some examples of a source: example k of the subset is example `indices[k]` of the source."""

    def __init__(self, source: Source, indices: Int64[np.ndarray, ' k'], pieces: Pieces | None):
        """`pieces` has only the runs of these examples; None for a source with random access."""
        super().__init__(source)
        self.num_examples = len(indices)
        self.pieces = pieces
        if source.labels is not None:
            self.labels = source.labels[indices]
        if source.label_lists is not None:
            self.label_lists = [source.label_lists[index] for index in indices]
        self.unreadable = {
            int(k): source.unreadable[int(indices[k])]
            for k in np.flatnonzero(np.isin(indices, list(source.unreadable)))
        }
        self._indices = indices
        self._table = tf.constant(indices)

    def fetch(self, indices):
        return self.source.fetch(tf.gather(self._table, indices))

    def name_of(self, index):
        return self.source.name_of(int(self._indices[index]))

    def restore(self, index):
        return self.source.restore(int(self._indices[index]))
