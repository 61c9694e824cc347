"""Batches for training and evaluation, as functions of the settings and the step.

Stages: positions -> items (index, and encoded bytes or path) -> images -> batches. When a batch
fails, its items are decoded again one by one to find out which are broken.
"""

import copy
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from jaxtyping import Int64

from vit_jax.data import order, sequential
from vit_jax.data.broken import BrokenImages
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.preprocess import eval_image, normalise, train_image
from vit_jax.data.source import Source
from vit_jax.data.tensorflow_errors import STORAGE_ERRORS, reason
from vit_jax.errors import UserError

logger = logging.getLogger('vit_jax.data')

# Batches made ahead of the one in use.
_PREFETCH = 2
# Besides them: gathered, batched, normalised, and the one in use. An estimate: the resident memory
# of a run was about 8 batches above that of its step, of which two belong to the training loop.
BATCHES_IN_MEMORY = _PREFETCH + 4
# Images decoded at the same time, which changes no result.
_PARALLEL = max(16, 2 * (os.cpu_count() or 1))

_ENDLESS = tf.int64.max

Batch = dict[str, np.ndarray]


def train_batches(
    source: Source,
    *,
    batch_size: int,
    image_size: tuple[int, int],
    seed: int,
    augment: Mapping,
    preprocess: Mapping,
    shuffle_buffer: int,
    files_at_once: int,
    max_broken_fraction: float,
    start_step: int = 0,
    share: tuple[int, int] = (0, 1),
    balance: float = 0.0,
) -> Iterator[Batch]:
    """Endless batches of one process, from `start_step` on.

    Args:
      batch_size: of all processes, a multiple of their number (sharding.check_batch).
      image_size: (height, width) in pixels.
      augment, preprocess: those sections of a config.
      shuffle_buffer, files_at_once: how a source that is read in sequence is shuffled.
      max_broken_fraction: of the split; more broken images end the run.
      share: (index of this process, number of processes).
      balance: share of the positions at which classes come equally often, see order.balanced.

    Returns:
      image float32 [local, height, width, 3], normalised; label int32 [local], or float32 [local,
      classes] of a multi-label source; mask bool [local], all true; local = batch_size / number
      of processes.

    Raises UserError for fewer examples than processes and, later, if too many images are broken.
    """
    local = batch_size // share[1]
    if source.pieces is not None and source.num_examples < share[1]:
        raise UserError(
            f'{source.num_examples} examples are too few for {share[1]} processes, each of which '
            'reads its own share; take fewer processes or a larger split'
        )
    broken = BrokenImages(source, max_broken_fraction)
    order_seed, augment_seed = order.stream_seeds(seed)
    shown: Callable[[Int64[tf.Tensor, ' k']], Int64[tf.Tensor, ' k']]
    if balance:
        assert source.labels is not None  # sources.class_counts has checked it
        shown = order.balanced(source.labels, balance, order_seed)
    else:
        shown = functools.partial(
            order.shuffled_index, num_examples=source.num_examples, seed=order_seed
        )

    def index_at(position):
        return broken.next_valid(shown(position))

    items = _items(
        source,
        batch_size,
        share,
        _ENDLESS,
        index_at,
        functools.partial(
            sequential.shuffled,
            seed=order_seed,
            window=shuffle_buffer,
            files_at_once=files_at_once,
            replace=broken.next_valid_row,
        ),
    )

    def keys_of_step(step):
        first = order.positions_of_step(step, batch_size, share)[0]
        return order.augment_bits(augment_seed, first, local)

    example = _training_example(source, image_size, augment, preprocess)

    def batches(step):
        keys = tf.data.Dataset.range(step, _ENDLESS).map(keys_of_step).unbatch()
        examples = tf.data.Dataset.zip(items(step), keys).map(example, num_parallel_calls=_PARALLEL)
        return examples.batch(local, drop_remainder=True)

    return _run(batches, lambda step: items(step).take(local), broken, start_step)


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
    """All examples of a split exactly once over all processes; can be iterated many times.

    Arguments and batches are as for `train_batches`, with as many batches on every process. Rows
    of padding and of broken images are zero, with mask false. Batches may have the `index` of each
    example in the split, int32 [local], too.
    """
    local = batch_size // share[1]
    broken = BrokenImages(source, max_broken_fraction)
    size = tuple(image_size)
    num_batches = -(-source.num_examples // batch_size)  # rounded up
    no_label = np.zeros(
        [len(source.class_names)] if source.multi_label else [],
        np.float32 if source.multi_label else np.int32,
    )

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
        index = {'index': tf.cast(item['index'], tf.int32)} if with_index else {}
        return {'image': image, 'label': label, 'mask': valid, **index}

    def batches(step):
        examples = items(step).map(example, num_parallel_calls=_PARALLEL).batch(local)
        return examples.map(lambda batch: {**batch, 'image': normalise(batch['image'], preprocess)})

    def readable_items(step):
        return items(step).take(local).filter(lambda item: ~broken.is_broken(item['index']))

    empty = {
        'image': np.zeros([local, *size, 3], np.float32),
        'label': np.stack([no_label] * local),
        'mask': np.zeros([local], bool),
    }
    if with_index:
        empty['index'] = np.zeros([local], np.int32)
    return EvalBatches(lambda: _run(batches, readable_items, broken, 0), num_batches, empty, broken)


class EvalBatches:
    """What `eval_batches` returns; each iteration reads the data again."""

    def __init__(self, run, num_batches, empty, broken):
        self._run, self._num_batches, self._empty, self._broken = run, num_batches, empty, broken

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        without_rows = {key: value[:0] for key, value in self._empty.items()}
        batches = itertools.chain(self._run(), itertools.repeat(without_rows))
        for batch in itertools.islice(batches, self._num_batches):
            valid = np.flatnonzero(batch['mask'])
            if len(valid) < len(self._empty['mask']):  # other rows become zero
                batch, found = copy.deepcopy(self._empty), batch
                for key, rows in batch.items():
                    rows[valid] = found[key][valid]
            yield batch

    @property
    def broken(self) -> list[str]:
        """Names of the images that this process has left out so far."""
        return self._broken.names()


def _training_example(source, image_size, augment, preprocess):
    """The function from an item and its keys to an example."""
    # Which images were decoded as a whole before. It changes no pixel, and so is not saved.
    intact = tf.Variable(tf.zeros([source.num_examples], tf.bool), trainable=False)

    def example(item, keys):
        encoded, label = source.load(item)
        before = intact.sparse_read(item['index'])
        image, now = train_image(encoded, keys, image_size, augment, preprocess, before)
        # Whether it is new or not: tf.cond would take longer than writing.
        note = intact.scatter_update(tf.IndexedSlices(now, item['index'])).op
        with tf.control_dependencies([note]):
            # Here, because the memory for a batch is new to the process each time.
            image = normalise(image, preprocess)
        return {'image': image, 'label': label, 'mask': tf.constant(True)}

    return example


def _items(source, batch_size, share, num_steps, index_at, in_sequence):
    """The function from a step to the items of one process from there on, up to `num_steps`.

    index_at(positions): indices of examples, for random access; in_sequence(pieces, start): items.
    """

    def fetch(step):
        index = index_at(order.positions_of_step(step, batch_size, share))
        return {**source.fetch(index), 'index': index}

    if source.pieces is None:
        return lambda step: (
            tf.data.Dataset.range(step, num_steps).map(fetch, num_parallel_calls=2).unbatch()
        )
    pieces, local = source.pieces.share(*share), batch_size // share[1]
    return lambda step: in_sequence(pieces, step * local)


def _run(batches, items_of_batch, broken, step):
    """NumPy batches from `step` on, started again at a batch that fails on a broken image.

    batches(step): data set of batches from `step` on, without the images found broken by then.
    items_of_batch(step): the items of that batch, not decoded.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False  # nothing is left to tune, and measuring takes time
    options.threading.max_intra_op_parallelism = 1  # images are what is worked on in parallel
    # No function of a pipeline has Python branches on tensors, and AutoGraph takes longer to look
    # for them than all else takes that is needed to build one.
    batches, items_of_batch = map(
        tf.autograph.experimental.do_not_convert, (batches, items_of_batch)
    )
    reread = -1  # the step of a batch that failed, although each of its images could be decoded
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
            files = broken.changed_files(items)
            if step == reread:
                raise UserError(
                    f'a batch cannot be read, and each of its images can: {reason(error)}. If '
                    'a program is writing to the data set, wait until it has ended and run the '
                    f'same command again. Files of the batch that changed last: {files or "none"}.'
                ) from error
            reread = step
            logger.warning(
                'a batch could not be read (%s), and each of its images can be now: reading it '
                'again. Files of the batch that changed last: %s',
                reason(error),
                files or 'none',
            )
