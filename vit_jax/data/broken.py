"""Images that cannot be decoded: found by a scan or when they fail, left out from then on.

Which image takes a position depends on the files only, never on when a broken one was found,
because the input is rebuilt at the batch that failed. The scan before training is limited in time
and may therefore find all broken images or none.
"""

import concurrent.futures
import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping

from jaxtyping import Bool, Int64

from vit_jax.data import preprocess, sequential
from vit_jax.data.folders import SILENCE
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.label_lists import OUT_OF_RANGE
from vit_jax.data.source import Source, WrappedSource, has_local_files
from vit_jax.data.tensorflow_errors import STORAGE_ERRORS, reason
from vit_jax.errors import UserError, some

logger = logging.getLogger('vit_jax.data')

# To look for all broken images when there are too many. Other processes wait longer than this.
_SCAN_SECONDS = 60
_SCANNED_TOGETHER = 64  # images between two looks at the clock
_LISTED = 1000  # in the message


class BrokenImages:
    """The broken images of a source that have been found so far, by their index in the split."""

    def __init__(
        self, source: Source, max_fraction: float, num_examined: int = 0, log: bool = True
    ):
        """Images that `source.unreadable` names are known from the start.

        `num_examined` is the number of images of which it is known whether they are broken.
        """
        self._source = source
        self._num_examined = num_examined
        self._num_restored = 0  # files of dataset.cache that were made again
        self._max_fraction = max_fraction
        self._reasons: dict[int, str] = {}  # index -> why it cannot be decoded
        # As a graph, so that errors of its Python functions arrive as they do in training.
        self._decode = tf.function(
            lambda item: preprocess.decode_image(source.load(item)[0]), autograph=False
        )
        if not log:
            self._reasons |= source.unreadable
        elif source.unreadable:
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

    def discover(self, items: tf.data.Dataset) -> bool:
        """Finds out which items of a batch that failed are broken; returns whether any is.

        Items are as `source.load` takes them, each with its 'index'. A file of dataset.cache that
        is damaged or missing is made again, which counts too. Raises UserError if too many images
        are broken, no readable one is left, or a file of many images cannot be read.
        """
        try:
            items = list(items)
        except STORAGE_ERRORS:
            raise
        except tf.errors.OpError as damage:
            raise UserError(
                f'a file of the data set in {os.path.dirname(self._source.name_of(0))} cannot be '
                f'read: {reason(damage)}. It is damaged or gone: copy it again from where it is '
                'whole, or prepare the data set again.'
            ) from damage
        restored_before = self._num_restored
        reasons = {int(item['index']): why for item in items if (why := self._reason(item))}
        if reasons:
            self._add(reasons)
        return bool(reasons) or self._num_restored > restored_before

    def changed_files(self, items: tf.data.Dataset) -> str:
        """The names of the files of a batch that changed last, for a message; '' of records."""
        times = {}
        for item in items:
            name = self._source.name_of(int(item['index']))
            with contextlib.suppress(OSError):
                times[name] = os.stat(name).st_mtime
        newest = sorted(times, key=times.__getitem__, reverse=True)
        return some(newest, 3)

    def _reason(self, item):
        """Why an item cannot be decoded, '' if it can."""
        try:
            self._decode(item)
        except STORAGE_ERRORS:
            raise  # the file may be good, and skipping it would change the run
        except tf.errors.OpError as error:
            index = int(item['index'])
            if OUT_OF_RANGE in error.message:
                self._refuse_label(index, error.message)
            if self._source.restore(index):
                self._num_restored += 1
                return self._reason(item)
            return reason(error)
        return ''

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
        self._check(bool(new))

    def _check(self, is_new):
        """Raises UserError if too many are broken, all are, or nothing new explains a failure."""
        total = self._source.num_examples
        too_many = len(self._reasons) / total > self._max_fraction
        if not is_new or too_many or len(self._reasons) == total:
            problem = (
                'no readable image is left to take the place of a broken one'
                if not is_new
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
        if self._num_examined == self._source.num_examples:
            return self._num_examined
        logger.info('looking for all broken images, %d s at most', _SCAN_SECONDS)
        reasons, seen = self.examine(_SCAN_SECONDS)
        self._reasons |= reasons
        return seen

    def examine(
        self, seconds: float, first: int = 0, check: Callable[[], None] = lambda: None
    ) -> tuple[dict[int, str], int]:
        """Decodes images, in parallel, as far as the time allows.

        Args:
          first: index of the first one, of a source with random access; the others follow in order,
            and those before it come last.
          check: called again and again; what it raises ends the work.

        Returns why, by index, for each that is broken and was not known, and how many it has seen.
        """
        source, end = self._source, time.monotonic() + seconds
        if source.pieces is not None:
            items = sequential.in_order(source.pieces, 0, 1)
        else:
            items = (
                tf.data.Dataset.range(first, first + source.num_examples)
                .batch(256)
                .map(lambda position: position % source.num_examples)
                .map(lambda index: {**source.fetch(index), 'index': index})
                .unbatch()
            )
        self._decode.get_concrete_function(items.element_spec)  # here, and not in each thread
        items = iter(items)
        reasons, seen = {}, 0
        with concurrent.futures.ThreadPoolExecutor() as pool:
            while time.monotonic() < end:
                check()
                part = list(itertools.islice(items, _SCANNED_TOGETHER))
                if not part:
                    break
                seen += len(part)
                # Those known by now may be pipes, which are not to be opened.
                part = [item for item in part if int(item['index']) not in self._reasons]
                for item, why in zip(part, pool.map(self._reason, part), strict=True):
                    if why:
                        reasons[int(item['index'])] = why
        return reasons, seen


def scan(
    source: Source,
    seconds: float,
    share: tuple[int, int] = (0, 1),
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[int, str], int]:
    """Broken images of a directory on this machine, before training meets them.

    Args:
      seconds: the scan ends after this time, with what it has found.
      share: (index of this process, number of processes), which begin at different images.
      check: called again and again; what it raises ends the work.

    Returns why, by index, for each broken image that was found, and the number of images examined:
    0 for sources of another kind, of which nothing is known before they are read.
    """
    if not has_local_files(source):
        return {}, 0
    first = source.num_examples * share[0] // share[1]
    folder = os.path.dirname(os.path.dirname(source.name_of(0)))
    begin = time.monotonic()
    announced = False

    def check_and_announce():
        nonlocal announced
        check()
        if not announced and time.monotonic() - begin >= SILENCE:
            logger.info('looking for broken images in %s, %d s at most', folder, seconds)
            announced = True

    examiner = BrokenImages(source, 1.0, log=False)
    try:
        reasons, seen = examiner.examine(seconds, first, check_and_announce)
    except STORAGE_ERRORS as error:
        logger.warning('the search for broken images ends early: %s', reason(error))
        return {}, 0
    logger.log(
        logging.INFO if announced else logging.DEBUG,
        'looked at %d of %d images in %s for %.1f s: %d broken',
        seen,
        source.num_examples,
        folder,
        time.monotonic() - begin,
        len(reasons),
    )
    return reasons, seen


class SourceWithBroken(WrappedSource):
    """A source of which more examples are known to be broken: why, by index."""

    def __init__(self, source: Source, reasons: Mapping[int, str]):
        super().__init__(source)
        self.unreadable = source.unreadable | dict(reasons)


def with_broken(source: Source, candidates: Collection[int]) -> Source:
    """The source with those of some images as `unreadable` that this process cannot decode."""
    examiner = BrokenImages(source, 1.0, log=False)
    indices = [index for index in candidates if index not in source.unreadable]
    reasons = {}
    for index in sorted(indices):
        item = {key: x[0] for key, x in source.fetch(tf.constant([index], tf.int64)).items()}
        why = examiner._reason({**item, 'index': tf.constant(index, tf.int64)})
        if why:
            reasons[index] = why
    return SourceWithBroken(source, reasons)


def require_few(source: Source, max_fraction: float, num_examined: int) -> None:
    """Raises UserError, with their names, if too many images are known to be broken, or all."""
    BrokenImages(source, max_fraction, num_examined, log=False)._check(is_new=True)
