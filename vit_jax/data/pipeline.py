"""Batches for training and evaluation, as functions of the settings and the step.

The stages are positions, items (index, and encoded bytes or path), images and batches. When a batch
fails, its items are decoded again one by one to find the broken images.
"""

import copy
import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from vit_jax.data import order, sequential
from vit_jax.data.broken import BrokenImages
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.preprocess import eval_image, normalise, train_image
from vit_jax.data.source import Source
from vit_jax.data.tensorflow_errors import STORAGE_ERRORS, reason
from vit_jax.errors import UserError

logger = logging.getLogger('vit_jax.data')

# Batches that the pipeline prepares ahead of the batch in use.
_PREFETCH = 2
# Four more batches are in memory: being gathered, batched, normalised, and in use. This is an
# estimate: the resident memory of a run was about 8 batches above the memory of its step, and two
# of the 8 belong to the training loop.
BATCHES_IN_MEMORY = _PREFETCH + 4
# Images that are decoded at the same time. The number does not change the result.
_PARALLEL = max(16, 2 * (os.cpu_count() or 1))

_ENDLESS = tf.int64.max

Batch = dict[str, np.ndarray]
# A function that maps a step to the items of one process from this step on.
ItemsFrom = Callable[[int | tf.Tensor], tf.data.Dataset]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a source becomes training batches.

    Attributes:
      batch_size: examples of all processes together, a multiple of the number of processes
        (sharding.check_batch).
      image_size: (height, width) in pixels.
      seed: the seed of the order and the augmentation.
      augment: `config.augment`.
      preprocess: `config.preprocess`.
      shuffle_buffer: records per shuffle window, for a source that is read in sequence.
      files_at_once: files that are read interleaved, for a source that is read in sequence.
      max_broken_fraction: more broken images than this fraction of the split end the run.
      share: (index of this process, number of processes).
      balance: share of the positions at which all classes are equally frequent; see order.balanced.
    """

    batch_size: int
    image_size: tuple[int, int]
    seed: int
    augment: Mapping
    preprocess: Mapping
    shuffle_buffer: int
    files_at_once: int
    max_broken_fraction: float
    share: tuple[int, int] = (0, 1)
    balance: float = 0.0

    @property
    def local_batch_size(self) -> int:
        """Examples of this process in a batch."""
        return self.batch_size // self.share[1]


def train_batches(source: Source, settings: TrainSettings, start_step: int = 0) -> Iterator[Batch]:
    """Endless batches of one process, from `start_step` on.

    Returns:
      Batches with `image`, normalised float32 [local, height, width, 3]; `label`, int32 [local], or
      float32 [local, classes] for a multi-label source; `mask`, bool [local], all true. `local` is
      batch_size / number of processes.

    Raises:
      UserError: if a source that is read in sequence has fewer examples than there are processes.
        The iteration raises it if too many images are broken.
    """
    num_processes = settings.share[1]
    if source.pieces is not None and source.num_examples < num_processes:
        raise UserError(
            f'the split has {source.num_examples} examples, which is too few for {num_processes} '
            'processes: each process reads its own examples. Use fewer processes or a larger '
            'split.',
            kind='value',
            value=source.num_examples,
        )
    broken = BrokenImages(source, settings.max_broken_fraction)
    order_seed, augment_seed = order.stream_seeds(settings.seed)
    items = _training_items(source, settings, order_seed, broken)
    keys = _augmentation_keys(settings, augment_seed)
    example = _training_example(source, settings)
    local = settings.local_batch_size

    def batches(step):
        items_and_keys = tf.data.Dataset.zip(items(step), keys(step))
        examples = items_and_keys.map(example, num_parallel_calls=_PARALLEL)
        return examples.batch(local, drop_remainder=True)

    def items_of_batch(step):
        return items(step).take(local)

    return _run(batches, items_of_batch, broken, start_step)


def _training_items(
    source: Source, settings: TrainSettings, seed: int, broken: BrokenImages
) -> ItemsFrom:
    """The shuffled items of one process; valid images replace broken images."""
    if settings.balance:
        assert source.labels is not None  # sources.class_counts has checked it
        shown_index = order.balanced(source.labels, settings.balance, seed)
    else:
        shown_index = functools.partial(
            order.shuffled_index, num_examples=source.num_examples, seed=seed
        )

    def index_at(position):
        return broken.next_valid(shown_index(position))

    shuffled_pieces = functools.partial(
        sequential.shuffled,
        seed=seed,
        window=settings.shuffle_buffer,
        files_at_once=settings.files_at_once,
        replace=broken.next_valid_row,
    )
    return _items(source, settings.batch_size, settings.share, _ENDLESS, index_at, shuffled_pieces)


def _augmentation_keys(settings, seed):
    """Returns a function from a step to a data set of the keys of all rows from this step on."""

    def keys_of_step(step):
        first = order.positions_of_step(step, settings.batch_size, settings.share)[0]
        return order.augment_bits(seed, first, settings.local_batch_size)

    return lambda step: tf.data.Dataset.range(step, _ENDLESS).map(keys_of_step).unbatch()


def _training_example(source, settings):
    """Returns a function from an item and its augmentation keys to a training example."""
    # Marks the images that were decoded as a whole before. The marks change no pixel, so they are
    # not saved.
    intact = tf.Variable(tf.zeros([source.num_examples], tf.bool), trainable=False)

    def example(item, keys):
        encoded, label = source.load(item)
        intact_before = intact.sparse_read(item['index'])
        image, intact_now = train_image(
            encoded,
            keys,
            settings.image_size,
            settings.augment,
            settings.preprocess,
            intact_before,
        )
        # Written even when it does not change: tf.cond would take longer than writing.
        note = intact.scatter_update(tf.IndexedSlices(intact_now, item['index'])).op
        with tf.control_dependencies([note]):
            # Normalised here, because the memory of a batch is new to the process each time.
            image = normalise(image, settings.preprocess)
        return {'image': image, 'label': label, 'mask': tf.constant(True)}

    return example


def eval_batches(
    source: Source,
    *,
    batch_size: int,
    image_size: tuple[int, int],
    preprocess: Mapping,
    files_at_once: int,
    max_broken_fraction: float,
    share: tuple[int, int] = (0, 1),
    with_index: bool = False,
) -> 'EvalBatches':
    """All examples of a split exactly once over all processes, for any number of iterations.

    Arguments are as in TrainSettings, and batches as from `train_batches`. Every process has the
    same number of batches. Rows of padding and of broken images are zero, and their mask is false.
    `with_index` adds `index`, the position of each example in the split, int32 [local].
    """
    local = batch_size // share[1]
    broken = BrokenImages(source, max_broken_fraction)
    size = tuple(image_size)
    num_batches = -(-source.num_examples // batch_size)  # rounded up
    no_label = _no_label(source)

    def index_at(position):
        return position[position < source.num_examples]

    items = _items(
        source,
        batch_size,
        share,
        num_batches,
        index_at,
        functools.partial(sequential.in_order, files_at_once=files_at_once),
    )

    def example(item):
        def read():
            encoded, label = source.load(item)
            return eval_image(encoded, size, preprocess), label

        valid = ~broken.is_broken(item['index'])
        image, label = tf.cond(valid, read, lambda: (tf.zeros([*size, 3]), tf.constant(no_label)))
        row = {'image': image, 'label': label, 'mask': valid}
        if with_index:
            row['index'] = tf.cast(item['index'], tf.int32)
        return row

    def batches(step):
        examples = items(step).map(example, num_parallel_calls=_PARALLEL).batch(local)
        return examples.map(lambda batch: {**batch, 'image': normalise(batch['image'], preprocess)})

    def readable_items(step):
        return items(step).take(local).filter(lambda item: ~broken.is_broken(item['index']))

    empty_batch = {
        'image': np.zeros([local, *size, 3], np.float32),
        'label': np.zeros([local, *no_label.shape], no_label.dtype),
        'mask': np.zeros([local], bool),
    }
    if with_index:
        empty_batch['index'] = np.zeros([local], np.int32)
    return EvalBatches(
        lambda: _run(batches, readable_items, broken, 0), num_batches, empty_batch, broken
    )


def _no_label(source):
    """The label of a padding row: zeros with the shape of a label of the source."""
    if source.multi_label:
        return np.zeros([len(source.class_names)], np.float32)
    return np.zeros([], np.int32)


class EvalBatches:
    """The batches that `eval_batches` returns; each iteration reads the data again."""

    def __init__(self, run, num_batches, empty_batch, broken):
        self._run = run
        self._num_batches = num_batches
        self._empty_batch = empty_batch
        self._broken = broken

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        without_rows = {key: value[:0] for key, value in self._empty_batch.items()}
        batches = itertools.chain(self._run(), itertools.repeat(without_rows))
        for batch in itertools.islice(batches, self._num_batches):
            yield self._padded(batch)

    def _padded(self, batch):
        """The batch with all its rows; rows without a valid example become zero."""
        valid = np.flatnonzero(batch['mask'])
        if len(valid) == len(self._empty_batch['mask']):
            return batch
        padded = copy.deepcopy(self._empty_batch)
        for key, rows in padded.items():
            rows[valid] = batch[key][valid]
        return padded

    @property
    def broken(self) -> list[str]:
        """Names of the images that this process has skipped so far."""
        return self._broken.names()


def _items(source, batch_size, share, num_steps, index_at, in_sequence) -> ItemsFrom:
    """Returns a function from a step to the items of one process from this step to `num_steps`.

    Args:
      index_at: maps positions to indices of examples, for a source with random access.
      in_sequence: maps (pieces, start) to items, for a source that is read in sequence.
    """

    def fetch(step):
        index = index_at(order.positions_of_step(step, batch_size, share))
        return {**source.fetch(index), 'index': index}

    def items_by_index(step):
        steps = tf.data.Dataset.range(step, num_steps)
        return steps.map(fetch, num_parallel_calls=2).unbatch()

    if source.pieces is None:
        return items_by_index
    pieces = source.pieces.share(*share)
    local = batch_size // share[1]
    return lambda step: in_sequence(pieces, step * local)


def _run(batches, items_of_batch, broken, step):
    """Yields NumPy batches from `step` on; restarts the input at a batch that has a broken image.

    Args:
      batches: maps a step to a data set of the batches from this step on. It leaves out the images
        that are known to be broken when it is called.
      items_of_batch: maps a step to the undecoded items of its batch.
    """
    options = _options()
    # No function of a pipeline has Python branches on tensors. Searching for them would take
    # AutoGraph longer than all other work of building a pipeline.
    batches = tf.autograph.experimental.do_not_convert(batches)
    items_of_batch = tf.autograph.experimental.do_not_convert(items_of_batch)
    reread_step = -1  # its batch failed, although each of its images could be decoded
    while True:
        stream = batches(step).prefetch(_PREFETCH).with_options(options).as_numpy_iterator()
        try:
            for batch in stream:
                yield batch
                step += 1
            return
        except tf.errors.OpError as error:
            items = items_of_batch(step).with_options(options)
            if broken.discover(items):
                continue
            if isinstance(error, STORAGE_ERRORS):
                raise
            changed_files = broken.changed_files(items) or 'none'
            if step == reread_step:
                raise UserError(
                    f'a batch cannot be read, although each of its images can: {reason(error)}. If '
                    'a program is writing to the data set, wait until it has ended and run the '
                    'same command again. The files of the batch that changed last: '
                    f'{changed_files}.',
                    kind='unreadable',
                ) from error
            reread_step = step
            logger.warning(
                'A batch could not be read (%s), although each of its images can be read now: '
                'reading it again. The files of the batch that changed last: %s',
                reason(error),
                changed_files,
            )


def _options():
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False  # the pipeline fixes its numbers, and measuring takes time
    options.threading.max_intra_op_parallelism = 1  # images are decoded in parallel instead
    return options
