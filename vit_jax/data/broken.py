"""Images that cannot be decoded: found when they fail, left out from then on.

Which image stands at a position depends on the files only, never on when a broken one was found:
finding one rebuilds the input at the batch that failed.
"""

import logging
import re

from vit_jax.data import preprocess
from vit_jax.data.host_tensorflow import tf
from vit_jax.errors import UserError

logger = logging.getLogger('vit_jax.data')

_STORAGE_ERRORS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError,
                   tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError,
                   tf.errors.AbortedError, tf.errors.CancelledError)


class BrokenImages:
    """The broken images of a source that are known so far, by their index in the split."""

    def __init__(self, source, max_fraction):
        self._source = source
        self._max_fraction = max_fraction
        self._reasons = {}  # index -> why it cannot be decoded
        # As a graph, so that what Python functions in it raise arrives as it does in training.
        self._decode = tf.function(lambda item: preprocess.decode_image(source.load(item)[0]))

    def is_broken(self, indices):
        """bool [k] tensor for int64 [k], of what is known now."""
        if not self._reasons:
            return tf.zeros_like(indices, tf.bool)
        known = tf.constant(sorted(self._reasons), tf.int64)
        place = tf.searchsorted(known, indices, out_type=tf.int64)
        return tf.gather(known, tf.minimum(place, len(self._reasons) - 1)) == indices

    def next_valid(self, indices):
        """int64 [k]: each index, or the next one (modulo the split) that is not broken."""
        if not self._reasons:
            return indices
        known = sorted(self._reasons)
        stand_ins = tf.constant(_stand_ins(known, self._source.num_examples), tf.int64)
        place = tf.searchsorted(tf.constant(known, tf.int64), indices, out_type=tf.int64)
        stand_in = tf.gather(stand_ins, tf.minimum(place, len(known) - 1))
        return tf.where(self.is_broken(indices), stand_in, indices)

    def next_valid_row(self, indices):
        """int64 [k]: for each row of a window, the first row from there on that is not broken.

        Goes round at the end. Where all rows are broken, each keeps its place.
        """
        rows = tf.range(tf.size(indices, tf.int64))
        if not self._reasons:
            return rows
        valid = tf.where(~self.is_broken(indices))[:, 0]
        valid = tf.cond(tf.size(valid) > 0, lambda: valid, lambda: rows)
        place = tf.searchsorted(valid, rows, out_type=tf.int64)
        return tf.gather(valid, place % tf.size(valid, tf.int64))

    def names(self):
        """Of those known so far, sorted."""
        return sorted(self._source.name_of(index) for index in self._reasons)

    def discover(self, items, error):
        """Finds out which items of a failed batch are broken.

        items: iterable of what `source.load` takes, each with its 'index'; one that has 'valid'
        false is left out. Raises `error` if none is broken, UserError if too many are.
        """
        reasons = {}
        for item in items:
            index = int(item['index'])
            if index in reasons or not item.get('valid', True):
                continue
            try:
                self._decode(item)
            except _STORAGE_ERRORS:
                raise  # the file may be good: to skip it would change the run
            except tf.errors.OpError as reason:
                reasons[index] = _one_line(reason)
        if not reasons:
            raise error
        new = {index: reason for index, reason in reasons.items() if index not in self._reasons}
        for index, reason in new.items():
            self._add(index, reason)
        if not new:
            raise UserError(self._report('no readable image is left to stand in for a broken one'))
        fraction = len(self._reasons) / self._source.num_examples
        if fraction > self._max_fraction:
            raise UserError(self._report('too many images are broken'))
        if fraction == 1:
            raise UserError(self._report('no image can be read'))

    def _add(self, index, reason):
        self._reasons[index] = reason
        name, total = self._source.name_of(index), self._source.num_examples
        logger.warning(
            'skipped broken image %s: %s (%d of %d)', name, reason, len(self._reasons), total
        )

    def _report(self, problem):
        count, total = len(self._reasons), self._source.num_examples
        names = sorted(f'  {self._source.name_of(i)}: {why}' for i, why in self._reasons.items())
        limit, advice = '', 'Mend or remove them'
        if count / total > self._max_fraction:
            limit = f'; dataset.max_broken_fraction allows {self._max_fraction:.2%}'
            advice += ', or raise that limit'
        return (
            f'{problem}: {count} of {total} seen so far, {count / total:.2%}{limit}. {advice}:\n'
            + '\n'.join(names)
        )


def _stand_ins(known, total):
    """For each of the broken indices in `known`, the next that is not among them (modulo total)."""
    broken, following = set(known), {}
    # From the end, so that a run of broken ones is walked once; the last run may go on at 0.
    valid = next((index for index in range(total) if index not in broken), 0)
    for index in reversed(known):
        if (index + 1) % total not in broken:
            valid = (index + 1) % total
        following[index] = valid
    return [following[index] for index in known]


def _one_line(error):
    """What TensorFlow says, without the names of nodes and the Python stack it adds."""
    text = error.message
    cause = re.search(r'^(?:\w+\.)*\w*Error: (.+)$', text, re.MULTILINE)
    if cause:
        return cause.group(1)
    text = re.sub(r'\[?\[?\{\{.*?\}\}(\]\])? ?|\[Op:.*|name: *$', '', text, flags=re.DOTALL)
    return ' '.join(text.split())
