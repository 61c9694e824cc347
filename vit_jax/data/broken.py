"""Images that cannot be decoded: found when they fail, left out from then on.

Which image takes a position depends on the files only, never on when a broken one was found,
because the input is rebuilt at the batch that failed.
"""

import logging
import re

from jaxtyping import Bool, Int64

from vit_jax.data import preprocess
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.sources import Source
from vit_jax.errors import UserError

logger = logging.getLogger('vit_jax.data')

_STORAGE_ERRORS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError,
                   tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError,
                   tf.errors.AbortedError, tf.errors.CancelledError)


class BrokenImages:
    """The broken images of a source that have been found so far, by their index in the split."""

    def __init__(self, source: Source, max_fraction: float):
        self._source = source
        self._max_fraction = max_fraction
        self._reasons = {}  # index -> why it cannot be decoded
        # As a graph, so that errors of its Python functions arrive as they do in training.
        self._decode = tf.function(lambda item: preprocess.decode_image(source.load(item)[0]))

    def is_broken(self, indices: Int64[tf.Tensor, '*k']) -> Bool[tf.Tensor, '*k']:
        """Whether each has been found broken by now."""
        # The last entry is above every index, so that every search ends inside the list.
        found = tf.constant([*sorted(self._reasons), tf.int64.max], tf.int64)
        flat = tf.reshape(indices, [-1])
        same = tf.gather(found, tf.searchsorted(found, flat)) == flat
        return tf.reshape(same, tf.shape(indices))

    def next_valid(self, indices: Int64[tf.Tensor, ' k']) -> Int64[tf.Tensor, ' k']:
        """Each index, or the next one (modulo the split) that is not broken."""
        # The loop ends, because `discover` stops a run in which all images are broken.
        return tf.while_loop(
            lambda index: tf.reduce_any(self.is_broken(index)),
            lambda index: (tf.where(self.is_broken(index), (index + 1) % self._source.num_examples,
                                    index),),
            [indices])[0]

    def next_valid_row(self, indices: Int64[tf.Tensor, ' k']) -> Int64[tf.Tensor, ' k']:
        """Each row of a window, or the next one (modulo the window) that is not broken.

        Where all are broken, each row keeps its place.
        """
        rows = tf.range(tf.size(indices, tf.int64))
        valid = tf.where(~self.is_broken(indices))[:, 0]
        valid = tf.cond(tf.size(valid) > 0, lambda: valid, lambda: rows)
        place = tf.searchsorted(valid, rows, out_type=tf.int64)
        return tf.gather(valid, place % tf.size(valid, tf.int64))

    def names(self) -> list[str]:
        """The sorted names of the images found so far."""
        return sorted(self._source.name_of(index) for index in self._reasons)

    def discover(self, items: tf.data.Dataset, error: tf.errors.OpError) -> None:
        """Finds out which items of a batch that failed with `error` are broken.

        Items are as `source.load` takes them, each with its 'index'. Raises `error` if none is
        broken, and UserError if too many images are broken or no readable one is left.
        """
        reasons = {}
        for item in items:
            try:
                self._decode(item)
            except _STORAGE_ERRORS:
                raise  # the file may be good, and skipping it would change the run
            except tf.errors.OpError as reason:
                reasons[int(item['index'])] = _one_line(reason)
        if not reasons:
            raise error
        known, total = len(self._reasons), self._source.num_examples
        for index, reason in reasons.items():
            if index not in self._reasons:
                self._reasons[index] = reason
                logger.warning('skipped broken image %s: %s (%d of %d)',
                               self._source.name_of(index), reason, len(self._reasons), total)
        self._check_limit(any_new=len(self._reasons) > known)

    def _check_limit(self, any_new):
        count, total = len(self._reasons), self._source.num_examples
        too_many = count / total > self._max_fraction
        if any_new and count < total and not too_many:
            return
        problem = ('no readable image is left to take the place of a broken one' if not any_new else
                   'too many images are broken' if too_many else 'no image can be read')
        limit, advice = '', 'Mend or remove them'
        if too_many:
            limit = f'; dataset.max_broken_fraction allows {self._max_fraction:.2%}'
            advice += ', or raise that limit'
        names = sorted(f'  {self._source.name_of(i)}: {why}' for i, why in self._reasons.items())
        raise UserError('\n'.join([f'{problem}: {count} of {total} seen so far, {count / total:.2%}'
                                   f'{limit}. {advice}:', *names]))


def _one_line(error):
    """TensorFlow's message without the names of nodes and the Python stack that it adds."""
    text = error.message
    if cause := re.search(r'^(?:\w+\.)*\w*Error: (.+)$', text, re.MULTILINE):
        return cause.group(1)
    text = re.sub(r'\[?\[?\{\{.*?\}\}(\]\])? ?|\[Op:.*|name: *$', '', text, flags=re.DOTALL)
    return ' '.join(text.split())
