"""Reading record files in a shuffled order that can be entered at any position.

Only whole records can be skipped in a tfrecord file, so the order is made of three parts that need
no memory of what came before: the files are permuted for each epoch; groups of them (segments) are
read interleaved, nothing carried from one to the next, so that a segment's length is known; and the
stream is cut into windows that are permuted in memory.
"""

from vit_jax.data import order
from vit_jax.data.host_tensorflow import tf

_FILE_ORDER = -1  # stands for the number of a window in the key of the order of files


def in_order(pieces, start, files_at_once):
    """Items {'record', 'index'} of the pieces from example `start` of them on, once each."""
    files = tf.range(len(pieces.take), dtype=tf.int64)
    return _read(pieces, files, tf.constant(start, tf.int64), files_at_once)


def shuffled(pieces, start, *, seed, window, files_at_once, replace):
    """Endless items {'record', 'index'} of shuffled epochs.

    start: number of items before the first, in any epoch; window: number of records permuted in
    memory; files_at_once: of a segment; replace(index int64 [k]) -> int64 [k]: which row of a
    window stands in for each row.
    """
    total = int(pieces.take.sum())
    num_pieces = len(pieces.take)

    def epoch_items(epoch):
        skip = tf.where(epoch == start // total, tf.constant(start % total, tf.int64), 0)
        file_key = order.key_of(seed, epoch, _FILE_ORDER)
        files = order.permute(
            tf.range(num_pieces, dtype=tf.int64), file_key, tf.constant(num_pieces, tf.int64)
        )
        first_window = skip // window

        def shuffle_window(number, items):
            size = tf.size(items['index'], tf.int64)
            rows = order.permute(tf.range(size), order.key_of(seed, epoch, number), size)
            rows = tf.gather(rows, replace(tf.gather(items['index'], rows)))
            return tf.nest.map_structure(lambda x: tf.gather(x, rows), items)

        windows = _read(pieces, files, first_window * window, files_at_once).batch(window)
        windows = windows.enumerate(first_window).map(shuffle_window)
        # One window ahead, so that reading goes on while this one is used.
        return windows.prefetch(1).unbatch().skip(skip - first_window * window)

    return tf.data.Dataset.range(start // total, tf.int64.max).flat_map(epoch_items)


def _read(pieces, files, skip, files_at_once):
    """Items of the pieces in the order `files` (int64 [pieces]) without the first `skip`."""
    filename = tf.constant(pieces.filename, tf.string)
    first_record, take = tf.constant(pieces.skip), tf.constant(pieces.take)
    first_index = tf.constant(pieces.first)
    number = tf.range(len(pieces.take), dtype=tf.int64)
    lengths = tf.math.segment_sum(tf.gather(take, files), number // files_at_once)
    ends = tf.cumsum(lengths)
    # Segments before the place are not opened at all; the rest is skipped unparsed.
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
