"""Images that cannot be decoded: found when they fail, left out from then on.

Which image takes a position depends on the files only, never on when a broken one was found,
because the input is rebuilt at the batch that failed.
"""

import concurrent.futures
import itertools
import logging
import os
import re
import time

from jaxtyping import Bool, Int64

from vit_jax.data import preprocess, sequential
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.label_lists import OUT_OF_RANGE
from vit_jax.data.sources import Source
from vit_jax.errors import UserError

logger = logging.getLogger('vit_jax.data')

STORAGE_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.ResourceExhaustedError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
# To look for all broken images when there are too many. Other processes wait longer than this.
_SCAN_SECONDS = 60
_LISTED = 1000  # in the message


class BrokenImages:
    """The broken images of a source that have been found so far, by their index in the split."""

    def __init__(self, source: Source, max_fraction: float):
        self._source = source
        self._max_fraction = max_fraction
        self._reasons = {}  # index -> why it cannot be decoded
        # As a graph, so that errors of its Python functions arrive as they do in training.
        self._decode = tf.function(
            lambda item: preprocess.decode_image(source.load(item)[0]), autograph=False
        )
        if source.unreadable:
            self._add(source.unreadable)

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
            lambda index: (
                tf.where(self.is_broken(index), (index + 1) % self._source.num_examples, index),
            ),
            [indices],
        )[0]

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
        broken, and UserError if too many images are broken, no readable one is left, or a file of
        many images cannot be read.
        """
        try:
            items = list(items)
        except STORAGE_ERRORS:
            raise
        except tf.errors.OpError as damage:
            raise UserError(
                f'a file of the data set in {os.path.dirname(self._source.name_of(0))} cannot be '
                f'read: {_one_line(damage)}. It is damaged or gone: copy it again from where it is '
                'whole, or prepare the data set again.'
            ) from damage
        reasons = {int(item['index']): why for item in items if (why := self._reason(item))}
        if not reasons:
            raise error
        self._add(reasons)

    def _reason(self, item):
        """Why an item cannot be decoded, '' if it can."""
        try:
            self._decode(item)
        except STORAGE_ERRORS:
            raise  # the file may be good, and skipping it would change the run
        except tf.errors.OpError as reason:
            if OUT_OF_RANGE in reason.message:
                self._refuse_label(int(item['index']), reason.message)
            if isinstance(reason, tf.errors.NotFoundError) and 'path' in item:
                self._require_photo(item)
            return _one_line(reason)
        return ''

    def _require_photo(self, item):
        """Raises UserError if what has gone is a file of dataset.cache: the photo may be good."""
        path = item['path'].numpy().decode(errors='backslashreplace')
        if path != (photo := self._source.name_of(int(item['index']))):
            raise UserError(
                f'{path}, in which dataset.cache=disk kept the pixels of {photo}, has '
                'gone: run the same command again, which makes it anew. A folder that '
                'nobody empties can be named as dataset.cache_dir.'
            )

    def _refuse_label(self, index, message):
        """Raises UserError for a label that is none of the classes: the image is not broken."""
        label = re.search(rf'{OUT_OF_RANGE}\W+?(-?\d+)', message)[1]
        raise UserError(
            f'{self._source.name_of(index)} has the label {label}: expected 0 to '
            f'{len(self._source.class_names) - 1}. Where examples have no label, as in the test '
            'split of some sets, take another split; or another dataset.label.'
        )

    def _add(self, reasons):
        """Logs new broken images; raises UserError if there are too many or no other is left."""
        new = {index: why for index, why in reasons.items() if index not in self._reasons}
        self._reasons |= new
        total = self._source.num_examples
        for number, (index, why) in enumerate(new.items(), len(self._reasons) - len(new) + 1):
            logger.warning(
                'skipped broken image %s: %s (%d of %d)',
                self._source.name_of(index),
                why,
                number,
                total,
            )
        too_many = len(self._reasons) / total > self._max_fraction
        if not new or too_many or len(self._reasons) == total:
            problem = (
                'no readable image is left to take the place of a broken one'
                if not new
                else 'too many images are broken'
                if too_many
                else 'no image can be read'
            )
            self._stop(problem, too_many)

    def _stop(self, problem, too_many):
        total, limit, advice = self._source.num_examples, '', 'Mend or remove them'
        seen = self._scan()
        if too_many:
            limit = f'; dataset.max_broken_fraction allows {self._max_fraction:.2%}'
            advice += ', or raise that limit'
        count = len(self._reasons)
        names = sorted(f'  {self._source.name_of(i)}: {why}' for i, why in self._reasons.items())
        if count > _LISTED:
            names[_LISTED:] = [f'  and {count - _LISTED} more']
        part = '' if seen == total else f', of which {seen} were looked at in order'
        raise UserError(
            '\n'.join(
                [
                    f'{problem}: {count} of {total}{part}, {count / total:.2%}{limit}. {advice}:',
                    *names,
                ]
            )
        )

    def _scan(self):
        """Adds all broken images of the split, as far as the time allows; returns how many it saw.

        So that they can be mended all at once, and not one in every run.
        """
        source, seen, end = self._source, 0, time.monotonic() + _SCAN_SECONDS
        logger.info('looking for all broken images, %d s at most', _SCAN_SECONDS)
        if source.pieces is not None:
            items = sequential.in_order(source.pieces, 0, 1)
        else:
            items = (
                tf.data.Dataset.range(source.num_examples)
                .batch(256)
                .map(lambda index: {**source.fetch(index), 'index': index})
                .unbatch()
            )
        self._decode.get_concrete_function(items.element_spec)  # here, and not in each thread
        items = iter(items)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            while time.monotonic() < end and (part := list(itertools.islice(items, 64))):
                # Those known by now may be pipes, which are not to be opened.
                part = [item for item in part if int(item['index']) not in self._reasons]
                for item, why in zip(part, pool.map(self._reason, part), strict=True):
                    if why:
                        self._reasons[int(item['index'])] = why
                seen += 64
        return min(seen, source.num_examples)


def _one_line(error):
    """TensorFlow's message without the names of nodes and the Python stack that it adds."""
    text = error.message
    if cause := re.search(r'^(?:\w+\.)*\w*Error: (.+)$', text, re.MULTILINE):
        return cause.group(1)
    text = re.sub(r'\[?\[?\{\{.*?\}\}(\]\])? ?|\[Op:.*|name: *$', '', text, flags=re.DOTALL)
    return ' '.join(text.split())
