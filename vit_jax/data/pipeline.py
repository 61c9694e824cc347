"""Batches for training and evaluation, as functions of the config and the step.

Stages: positions -> items (index, and encoded bytes or path) -> images -> batches. When a batch
fails, its items are read again alone to find out what is broken.
"""

import os

import numpy as np

from vit_jax.data import order, preprocess, sequential
from vit_jax.data.broken import BrokenImages
from vit_jax.data.host_tensorflow import tf
from vit_jax.errors import UserError

# Batches made ahead of the one in use.
_PREFETCH = 2
# Beside them: gathered, put together, normalised, and the one handed out. An estimate: a run's
# resident memory was about 8 batches above its step's, two of them being train.py's own.
BATCHES_IN_MEMORY = _PREFETCH + 4
# Images decoded at the same time. Changes no result.
_PARALLEL = max(16, 2 * (os.cpu_count() or 1))


def train_batches(source, config, start_step=0, process_index=0, process_count=1):
    """Endless batches of one process, from `start_step` on.

    Yields dicts of numpy arrays: image float32 [local, height, width, 3], normalised; label int32
    [local]; mask bool [local], all true; local = config.batch_size / process_count.
    Raises UserError for settings that do not fit, and when too many images are broken.
    """
    local = _local_batch_size(config, process_count)
    broken = BrokenImages(source, config.dataset.max_broken_fraction)
    seeds = order.stream_seeds(config.seed)
    share = (config.batch_size, process_index, process_count)

    def items(step):
        if hasattr(source, 'pieces'):
            return _sequential_train_items(source, config, seeds, broken, step, share)
        return _random_access_train_items(source, seeds, broken, step, share)

    def example(item):
        encoded, label = source.load(item)
        image = preprocess.augment(preprocess.decode_image(encoded), item['seeds'], config)
        return {'image': image, 'label': label}

    def finish(batch):
        # MixUp goes here, keyed by the positions of the batch.
        image = preprocess.normalise(batch['image'], config.preprocess)
        return {'image': image, 'label': batch['label'], 'mask': tf.ones([local], tf.bool)}

    def build(step):
        return _examples(items(step), example).batch(local, drop_remainder=True).map(finish)

    return _run(build, lambda step: items(step).take(local), broken, start_step)


def _random_access_train_items(source, seeds, broken, first_step, share):
    order_seed, augment_seed = seeds

    def fetch(step):
        position = order.positions_of_step(step, *share)
        index = order.shuffled_index(position, source.num_examples, order_seed)
        index = broken.next_valid(index)
        keys = order.augment_bits(augment_seed, position[0], len(position))
        return {**source.fetch(index), 'index': index, 'seeds': keys}

    steps = tf.data.Dataset.range(first_step, tf.int64.max)
    return steps.map(fetch, num_parallel_calls=2).unbatch()


def _sequential_train_items(source, config, seeds, broken, first_step, share):
    order_seed, augment_seed = seeds
    batch_size, process_index, process_count = share
    local = batch_size // process_count
    pieces = source.pieces.share(process_index, process_count)
    if not len(pieces.take):
        raise UserError(
            f'{source.num_examples} examples are too few for {process_count} processes, each of '
            'which reads its own share; take fewer processes or a larger split'
        )
    items = sequential.shuffled(
        pieces,
        first_step * local,
        seed=order_seed,
        window=config.dataset.shuffle_buffer,
        files_at_once=config.dataset.files_at_once,
        replace=broken.next_valid_row,
    )

    def keys_of_step(step):
        return order.augment_bits(augment_seed, order.positions_of_step(step, *share)[0], local)

    keys = tf.data.Dataset.range(first_step, tf.int64.max).map(keys_of_step).unbatch()
    return tf.data.Dataset.zip(items, keys).map(lambda item, seeds: {**item, 'seeds': seeds})


def eval_batches(source, config, process_index=0, process_count=1):
    """All examples of a split exactly once over all processes; can be iterated many times.

    Batches are as in `train_batches`, the same number of them (`len`) on every process. Rows that
    are padding or a broken image are zero, with mask false.
    """
    return EvalBatches(source, config, process_index, process_count)


class EvalBatches:
    """See `eval_batches`."""

    def __init__(self, source, config, process_index, process_count):
        self._local = _local_batch_size(config, process_count)
        self._source, self._config = source, config
        self._share = (config.batch_size, process_index, process_count)
        self._broken = BrokenImages(source, config.dataset.max_broken_fraction)

    def __len__(self):
        # A process of a sequential source has at most this many examples.
        largest_share = -(-self._source.num_examples // self._share[2])
        return -(-largest_share // self._local)

    def __iter__(self):
        batches = _run(
            self._build, lambda step: self._items(step).take(self._local), self._broken, 0
        )
        done = 0
        for batch in batches:
            done += 1
            yield _masked(batch, self._local)
        size = (0, *self._config.image_size, 3)
        empty = {
            'image': np.zeros(size, np.float32),
            'label': np.zeros([0], np.int32),
            'mask': np.zeros([0], bool),
        }
        for _ in range(done, len(self)):
            yield _masked(empty, self._local)

    @property
    def broken(self):
        """Names of the images left out by now, those of this process."""
        return self._broken.names()

    def _items(self, first_step):
        if hasattr(self._source, 'pieces'):
            pieces = self._source.pieces.share(*self._share[1:])
            items = sequential.in_order(
                pieces, first_step * self._local, self._config.dataset.files_at_once
            )
            return items.map(lambda item: {**item, 'valid': ~self._is_broken(item['index'])})

        def fetch(step):
            index = order.positions_of_step(step, *self._share)
            index = index[index < self._source.num_examples]
            valid = ~self._broken.is_broken(index)
            return {**self._source.fetch(index), 'index': index, 'valid': valid}

        steps = tf.data.Dataset.range(first_step, len(self))
        return steps.map(fetch, num_parallel_calls=2).unbatch()

    def _is_broken(self, index):
        return self._broken.is_broken(index[None])[0]

    def _build(self, first_step):
        size, settings = tuple(self._config.image_size), self._config.preprocess

        def read(item):
            encoded, label = self._source.load(item)
            image = preprocess.decode_image(encoded)
            return preprocess.resize_and_central_crop(image, size, settings), label

        def example(item):
            image, label = tf.cond(
                item['valid'],
                lambda: read(item),
                lambda: (tf.zeros([*size, 3]), tf.constant(0)),
            )
            return {'image': image, 'label': label, 'mask': item['valid']}

        def finish(batch):
            return {**batch, 'image': preprocess.normalise(batch['image'], settings)}

        return _examples(self._items(first_step), example).batch(self._local).map(finish)


def _examples(items, example):
    return items.map(example, num_parallel_calls=_PARALLEL)


def _run(build, items_of, broken, step):
    """Numpy batches of build(step), with a new build at a batch that fails on a broken image.

    build(step): data set of batches from `step` on, without the images known to be broken.
    items_of(step): the items of that batch, not decoded.
    """
    options = tf.data.Options()
    options.deterministic = True
    while True:
        batches = build(step).prefetch(_PREFETCH).with_options(options).as_numpy_iterator()
        while True:
            try:
                batch = next(batches, None)
            except tf.errors.OpError as error:
                broken.discover(items_of(step).with_options(options), error)
                break
            if batch is None:
                return
            yield batch
            step += 1


def _masked(batch, size):
    """The batch with zero rows up to `size` and in place of what the mask leaves out."""
    missing = size - len(batch['mask'])
    if missing:
        batch = {
            key: np.concatenate([value, np.zeros([missing, *value.shape[1:]], value.dtype)])
            for key, value in batch.items()
        }
    if not batch['mask'].all():
        image = np.where(batch['mask'][:, None, None, None], batch['image'], np.float32(0))
        batch = {**batch, 'image': image}
    return batch


def _local_batch_size(config, process_count):
    if config.batch_size % process_count:
        raise UserError(
            f'batch_size {config.batch_size} does not divide by {process_count} processes; '
            f'take {config.batch_size // process_count * process_count or process_count}'
        )
    return config.batch_size // process_count
