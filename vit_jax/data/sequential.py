"""Reading record files in a shuffled order that can start at any position.

In a tfrecord file, records can only be skipped one by one. The order therefore consists of three
independent parts. The files are permuted for each epoch. Groups of files (segments) are read
interleaved. Each file is read to its end, so that the length of a segment is known. The stream is
cut into windows that are permuted in memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped

from vit_jax.data import order
from vit_jax.data.host_tensorflow import tf

# Shuffling has up to this many windows in memory: the window in use, the next window, and its
# permuted copy.
WINDOWS_IN_MEMORY = 3

_FILE_ORDER = -1  # replaces the window number in the key that decides the order of files


class Pieces(NamedTuple):
    """Runs of records in files; each array has one entry per run.

    Attributes:
      filename: the file that contains the run.
      skip: number of records before the run in its file.
      take: number of records in the run.
      first: the index of the first example of the run in the split.
    """

    filename: Shaped[np.ndarray, ' runs']
    skip: Int64[np.ndarray, ' runs']
    take: Int64[np.ndarray, ' runs']
    first: Int64[np.ndarray, ' runs']

    def share(self, process: int, num_processes: int) -> 'Pieces':
        """The contiguous part of one process; the sizes of parts differ by at most one."""
        total = int(self.take.sum())
        begin = total * process // num_processes
        end = total * (process + 1) // num_processes
        cut = np.maximum(begin - self.first, 0)
        take = np.minimum(self.first + self.take, end) - (self.first + cut)
        keep = take > 0
        return Pieces(
            filename=self.filename[keep],
            skip=(self.skip + cut)[keep],
            take=take[keep],
            first=(self.first + cut)[keep],
        )


def bytes_per_record(pieces: Pieces) -> float:
    """Mean size of a record, from the first 32 records of up to eight runs of records."""
    num_runs = len(pieces.take)
    sizes = []
    for run in np.linspace(0, num_runs - 1, min(8, num_runs), dtype=int):
        records = tf.data.TFRecordDataset(pieces.filename[run])
        records = records.skip(pieces.skip[run]).take(min(32, pieces.take[run]))
        sizes += [len(record) for record in records.as_numpy_iterator()]
    return float(np.mean(sizes))


def in_order(pieces: Pieces, start: int, files_at_once: int) -> tf.data.Dataset:
    """The items {'record', 'index'} of the pieces in order, from item number `start` on."""
    files = tf.range(len(pieces.take), dtype=tf.int64)
    return _read(pieces, files, tf.constant(start, tf.int64), files_at_once)


def shuffled(
    pieces: Pieces,
    start: int,
    *,
    seed: int,
    window: int,
    files_at_once: int,
    replace: Callable[[tf.Tensor], tf.Tensor],
) -> tf.data.Dataset:
    """Endless items {'record', 'index'} of shuffled epochs, from item number `start` on.

    Args:
      window: records that are permuted in memory.
      files_at_once: files that are read interleaved.
      replace: maps the indices of the rows of a window, int64 [k], to the row that replaces each of
        them, int64 [k].
    """
    total = int(pieces.take.sum())
    num_pieces = len(pieces.take)

    def epoch_items(epoch):
        skip = tf.where(epoch == start // total, tf.constant(start % total, tf.int64), 0)
        files = order.permute(
            tf.range(num_pieces, dtype=tf.int64), order.key_of(seed, epoch, _FILE_ORDER), num_pieces
        )
        first_window = skip // window

        def shuffle_window(number, items):
            size = tf.size(items['index'], tf.int64)
            rows = order.permute(tf.range(size), order.key_of(seed, epoch, number), size)
            rows = tf.gather(rows, replace(tf.gather(items['index'], rows)))
            return tf.nest.map_structure(lambda x: tf.gather(x, rows), items)

        windows = _read(pieces, files, first_window * window, files_at_once).batch(window)
        windows = windows.enumerate(first_window).map(shuffle_window)
        # Prefetches one window, so that reading continues while the current window is used.
        return windows.prefetch(1).unbatch().skip(skip - first_window * window)

    return tf.data.Dataset.range(start // total, tf.int64.max).flat_map(epoch_items)


def _read(pieces, files, skip, files_at_once):
    """Items of the pieces in the order `files` (int64 [pieces]), without the first `skip` items."""
    filename, first_record, take, first_index = map(tf.constant, pieces)
    segment_of_file = tf.range(len(pieces.take), dtype=tf.int64) // files_at_once
    lengths = tf.math.segment_sum(tf.gather(take, files), segment_of_file)
    ends = tf.cumsum(lengths)
    # Segments before the first item are not opened. Within its segment, records are skipped without
    # parsing.
    first_segment = tf.searchsorted(ends, [skip], side='right', out_type=tf.int64)[0]
    skip -= tf.reduce_sum(lengths[:first_segment])

    def read_piece(piece):
        records = tf.data.TFRecordDataset(filename[piece])
        records = records.skip(first_record[piece]).take(take[piece])
        return records.enumerate(first_index[piece]).map(
            lambda index, record: {'record': record, 'index': index}
        )

    def read_segment(segment):
        members = files[segment * files_at_once : (segment + 1) * files_at_once]
        return tf.data.Dataset.from_tensor_slices(members).interleave(
            read_piece,
            cycle_length=files_at_once,
            num_parallel_calls=files_at_once,
            deterministic=True,
        )

    segments = tf.data.Dataset.range(first_segment, tf.size(lengths, tf.int64))
    return segments.flat_map(read_segment).skip(skip)
