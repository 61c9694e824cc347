"""Broken images: found by a scan or when decoding fails, and skipped from then on.

The image that replaces a broken one depends on the files only, never on the time at which the
broken image was found, because the input is rebuilt at the batch that failed. The scan before
training has a time limit, so it may miss broken images.
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

# Time limit of the search for all broken images when there are too many. Other processes wait
# longer than this.
_SEARCH_SECONDS = 60
_IMAGES_PER_TIME_CHECK = 64
_MAX_LISTED = 1000  # images in a message


def _do_nothing():
    """The default of `check`."""


class BrokenImages:
    """The broken images of a source that are known so far, by their index in the split."""

    def __init__(
        self, source: Source, max_fraction: float, num_examined: int = 0, log: bool = True
    ):
        """Starts with the images in `source.unreadable`.

        Args:
          max_fraction: more broken images than this fraction of the split are an error.
          num_examined: the number of images that an earlier search for broken images has decoded.
          log: whether to log the images in `source.unreadable`, and raise UserError if they are too
            many.
        """
        self._source = source
        self._num_examined = num_examined
        self._num_restored = 0  # files of dataset.cache that were rebuilt
        self._max_fraction = max_fraction
        self._reasons: dict[int, str] = {}  # index -> the reason why it cannot be decoded
        # As a graph, so that errors of its Python functions arrive as they do in training.
        self._decode = tf.function(
            lambda item: preprocess.decode_image(source.load(item)[0]), autograph=False
        )
        if not log:
            self._reasons |= source.unreadable
        elif source.unreadable:
            self._add(source.unreadable)

    def is_broken(self, indices: Int64[tf.Tensor, '*k']) -> Bool[tf.Tensor, '*k']:
        """Whether each image is known to be broken."""
        # The last entry is above every index, so that every search ends inside the list.
        broken = tf.constant([*sorted(self._reasons), tf.int64.max], tf.int64)
        flat = tf.reshape(indices, [-1])
        is_broken = tf.gather(broken, tf.searchsorted(broken, flat)) == flat
        return tf.reshape(is_broken, tf.shape(indices))

    def next_valid(self, indices: Int64[tf.Tensor, ' k']) -> Int64[tf.Tensor, ' k']:
        """Each index, or the next index (modulo the split) whose image is not broken."""

        def any_is_broken(index):
            return tf.reduce_any(self.is_broken(index))

        def step_over_broken(index):
            following = (index + 1) % self._source.num_examples
            return (tf.where(self.is_broken(index), following, index),)

        # The loop ends, because `discover` stops a run in which all images are broken.
        return tf.while_loop(any_is_broken, step_over_broken, [indices])[0]

    def next_valid_row(self, indices: Int64[tf.Tensor, ' k']) -> Int64[tf.Tensor, ' k']:
        """Each row of a window, or the next row (modulo the window) whose image is not broken.

        If all images of the window are broken, each row keeps its place.
        """
        rows = tf.range(tf.size(indices, tf.int64))
        valid = tf.where(~self.is_broken(indices))[:, 0]
        valid = tf.cond(tf.size(valid) > 0, lambda: valid, lambda: rows)
        place = tf.searchsorted(valid, rows, out_type=tf.int64)
        return tf.gather(valid, place % tf.size(valid, tf.int64))

    def names(self) -> list[str]:
        """The sorted names of the broken images that are known so far."""
        return sorted(self._source.name_of(index) for index in self._reasons)

    def discover(self, items: tf.data.Dataset) -> bool:
        """Finds the broken items of a batch that failed, and adds them.

        Args:
          items: items for `source.load`, each with its 'index'.

        Returns:
          Whether the batch may be read again with another result: an item is broken, or a damaged
          or missing file of dataset.cache was rebuilt.

        Raises:
          UserError: if too many images are broken, no readable image remains, or a file of many
            images cannot be read.
        """
        try:
            items = list(items)
        except STORAGE_ERRORS:
            raise
        except tf.errors.OpError as damage:
            folder = os.path.dirname(self._source.name_of(0))
            raise UserError(
                f'a file of the data set in {folder} cannot be read: {reason(damage)}. It is '
                'damaged or missing: copy it again from an intact copy, or prepare the data set '
                'again.',
                kind='unreadable',
                file=folder,
            ) from damage
        num_restored_before = self._num_restored
        reasons = {}
        for item in items:
            why_broken = self._reason(item)
            if why_broken:
                reasons[int(item['index'])] = why_broken
        if reasons:
            self._add(reasons)
        return bool(reasons) or self._num_restored > num_restored_before

    def changed_files(self, items: tf.data.Dataset) -> str:
        """The names of the files of a batch that changed last, for a message; '' for records."""
        times = {}
        for item in items:
            name = self._source.name_of(int(item['index']))
            with contextlib.suppress(OSError):
                times[name] = os.stat(name).st_mtime
        newest = sorted(times, key=times.__getitem__, reverse=True)
        return some(newest, 3)

    def _reason(self, item):
        """The reason why an item cannot be decoded, '' if it can.

        If the item is a damaged file of dataset.cache, the file is rebuilt first.
        """
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
        """Raises UserError, because an image has a label outside the classes and is not broken."""
        label = int(re.search(rf'{OUT_OF_RANGE}\W+?(-?\d+)', message)[1])
        raise UserError(
            f'{self._source.name_of(index)} has the label {label}: expected 0 to '
            f'{len(self._source.class_names) - 1}. If examples have no label, as in the test '
            'split of some sets, use another split or another dataset.label.',
            kind='content',
            field='dataset.label',
            value=label,
        )

    def _add(self, reasons):
        """Adds and logs new broken images; raises UserError if training cannot continue."""
        new = {index: why for index, why in reasons.items() if index not in self._reasons}
        num_known = len(self._reasons)
        self._reasons |= new
        for number, (index, why) in enumerate(new.items(), num_known + 1):
            logger.warning(
                'Skipped broken image %s: %s (%d of %d)',
                self._source.name_of(index),
                why,
                number,
                self._source.num_examples,
            )
        if not new:  # the failure of the batch has no explanation
            self._stop('no readable image is left to replace a broken one')
        self.stop_if_too_many()

    def stop_if_too_many(self) -> None:
        """Raises UserError with the names of the broken images if too many or all are broken."""
        if self._exceeds_limit():
            self._stop('too many images are broken')
        if len(self._reasons) == self._source.num_examples:
            self._stop('no image can be read')

    def _exceeds_limit(self):
        return len(self._reasons) / self._source.num_examples > self._max_fraction

    def _stop(self, problem):
        """Looks for all broken images, and raises UserError with their names."""
        exceeds_limit = self._exceeds_limit()  # before the search, which finds more
        num_examined = self._search()
        total = self._source.num_examples
        count = len(self._reasons)
        examined = ''
        if num_examined < total:
            examined = f' ({num_examined} were examined)'
        limit = ''
        advice = 'Fix or remove them'
        field = None
        if exceeds_limit:
            field = 'dataset.max_broken_fraction'
            limit = f'; {field} allows {self._max_fraction:.2%}'
            advice += ', or raise this limit'
        lines = sorted(f'  {self._source.name_of(i)}: {why}' for i, why in self._reasons.items())
        if count > _MAX_LISTED:
            lines[_MAX_LISTED:] = [f'  and {count - _MAX_LISTED} more']
        summary = f'{count} of {total}{examined}, {count / total:.2%}{limit}'
        raise UserError(
            '\n'.join([f'{problem}: {summary}. {advice}:', *lines]),
            kind='unreadable',
            field=field,
            value=count,
        )

    def _search(self):
        """Adds all broken images of the split that it finds in time; returns how many it examined.

        The user can then fix all of them together, instead of a few in every run.
        """
        if self._num_examined == self._source.num_examples:
            return self._num_examined
        logger.info('Looking for all broken images, for at most %d s', _SEARCH_SECONDS)
        reasons, num_examined = self.examine(_SEARCH_SECONDS)
        self._reasons |= reasons
        return num_examined

    def examine(
        self, seconds: float, first: int = 0, check: Callable[[], None] = _do_nothing
    ) -> tuple[dict[int, str], int]:
        """Decodes images in parallel until the time is over.

        Args:
          first: index of the first image of a source with random access. The others follow in
            order; the images before `first` come last.
          check: called repeatedly; an exception from it ends the work.

        Returns:
          The reason for each image that is newly found to be broken, by index, and the number of
          images that were examined.
        """
        end = time.monotonic() + seconds
        items = self._all_items(first)
        # Traced here, so that the threads do not trace it at the same time.
        self._decode.get_concrete_function(items.element_spec)
        items = iter(items)
        reasons = {}
        num_examined = 0
        with concurrent.futures.ThreadPoolExecutor() as pool:
            while time.monotonic() < end:
                check()
                part = list(itertools.islice(items, _IMAGES_PER_TIME_CHECK))
                if not part:
                    break
                num_examined += len(part)
                # Images that are known to be broken may be pipes, which must not be opened.
                part = [item for item in part if int(item['index']) not in self._reasons]
                for item, why in zip(part, pool.map(self._reason, part), strict=True):
                    if why:
                        reasons[int(item['index'])] = why
        return reasons, num_examined

    def _all_items(self, first):
        """Each item of the split once, with its 'index'; with random access `first` comes first."""
        source = self._source
        if source.pieces is not None:
            return sequential.in_order(source.pieces, 0, 1)
        return (
            tf.data.Dataset.range(first, first + source.num_examples)
            .batch(256)
            .map(lambda position: position % source.num_examples)
            .map(lambda index: {**source.fetch(index), 'index': index})
            .unbatch()
        )

    def reason_at(self, index: int) -> str:
        """Why an image cannot be decoded, or ''; only for sources with random access."""
        items = self._source.fetch(tf.constant([index], tf.int64))
        item = {key: column[0] for key, column in items.items()}
        return self._reason({**item, 'index': tf.constant(index, tf.int64)})


def scan(
    source: Source,
    seconds: float,
    share: tuple[int, int] = (0, 1),
    check: Callable[[], None] = _do_nothing,
) -> tuple[dict[int, str], int]:
    """Looks for broken images of a directory on this machine before training starts.

    Args:
      seconds: the scan ends after this time and returns the images that it has found by then.
      share: (index of this process, number of processes). Each process starts at another image.
      check: called repeatedly; an exception from it ends the scan.

    Returns:
      The reason for each broken image, by index, and the number of images that were examined. The
      number is 0 for other kinds of sources, which are not scanned.
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
            logger.info('Looking for broken images in %s, for at most %d s', folder, seconds)
            announced = True

    examiner = BrokenImages(source, 1.0, log=False)
    try:
        reasons, num_examined = examiner.examine(seconds, first, check_and_announce)
    except STORAGE_ERRORS as error:
        logger.warning('The search for broken images ended early: %s', reason(error))
        return {}, 0
    level = logging.DEBUG
    if announced:
        level = logging.INFO
    logger.log(
        level,
        'Examined %d of %d images in %s in %.1f s: %d are broken',
        num_examined,
        source.num_examples,
        folder,
        time.monotonic() - begin,
        len(reasons),
    )
    return reasons, num_examined


class SourceWithBroken(WrappedSource):
    """A source with further broken images; `reasons` maps the index of each to the reason."""

    def __init__(self, source: Source, reasons: Mapping[int, str]):
        super().__init__(source)
        self.unreadable = source.unreadable | dict(reasons)


def with_broken(source: Source, candidates: Collection[int]) -> Source:
    """The source whose `unreadable` also has the candidates that this process cannot decode."""
    examiner = BrokenImages(source, 1.0, log=False)
    reasons = {}
    for index in sorted(candidates):
        if index in source.unreadable:
            continue
        why_broken = examiner.reason_at(index)
        if why_broken:
            reasons[index] = why_broken
    return SourceWithBroken(source, reasons)


def require_few(source: Source, max_fraction: float, num_examined: int) -> None:
    """Raises UserError with the names of the known broken images if too many or all are broken."""
    BrokenImages(source, max_fraction, num_examined, log=False).stop_if_too_many()
