"""Parts of a training split by a fixed order, in which a smaller one is contained in a larger."""

import numpy as np
from jaxtyping import Int64

from vit_jax.data import order, stratify
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.sequential import Pieces
from vit_jax.data.source import Source, WrappedSource
from vit_jax.errors import UserError

# Of the permutation; any numbers would do, and others would change every subset.
_KEY = (1_523_766_341, -822_190_767, 417_089_203)


def subset(source: Source, size: str, split: str) -> Source:
    """The first examples of a permutation that only depends on how many there are.

    Of a stratified source they are the first of stratify.stratified_order, in which every class is
    in proportion. Of files that are read in sequence, they are the first of each file in proportion
    to its length: TFDS has shuffled them when it wrote them. `size` is '1000' or '10%', '' for all,
    and `split` a name for messages. Raises UserError where these are none, or more than there are.
    """
    if not size:
        return source
    total = source.num_examples
    pieces = source.pieces
    count = round(float(size[:-1]) * total / 100) if size.endswith('%') else int(size)
    if not 1 <= count <= total:
        raise UserError(
            f'dataset.subset is {size}, which are {count} images, and {split} has '
            f'{total}: expected 1 to {total}, or a share of them.'
        )
    if source.stratified:
        assert source.labels is not None  # by which it is stratified
        return Subset(source, stratify.stratified_order(source.labels)[:count], None)
    if pieces is None:
        permuted = order.permute(tf.range(count, dtype=tf.int64), _KEY, total).numpy()
        return Subset(source, permuted, None)
    take = _shares(pieces.take, count)
    first = np.cumsum(take) - take
    shorter = Pieces(*(x[take > 0] for x in (pieces.filename, pieces.skip, take, first)))
    return Subset(source, np.arange(count) + np.repeat(pieces.first - first, take), shorter)


def _shares(sizes, count):
    """How many of each are taken to make `count`, in proportion; of a larger count no fewer."""

    def taken(share):
        return np.minimum(sizes, np.floor(share * sizes + 0.5).astype(np.int64))

    low, high = 0.0, 2.0
    for _ in range(100):  # until no number is between them
        middle = (low + high) / 2
        low, high = (middle, high) if taken(middle).sum() <= count else (low, middle)
    found = taken(low)
    found[np.flatnonzero(taken(high) > found)[: count - found.sum()]] += 1
    return found


class Subset(WrappedSource):
    """Some examples of a source: the one of index k here has the index indices[k] there."""

    def __init__(self, source: Source, indices: Int64[np.ndarray, ' k'], pieces: Pieces | None):
        """Pieces are those of these examples alone, None for a source with random access."""
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
