"""Reading record files in sequence: shares of processes, segments and windows."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.batches import COUNT, make, numbers
from vit_jax.data import sequential


def make_pieces(names, skip, take):
    take = np.array(take, np.int64)
    return sequential.Pieces(
        np.array(names, object), np.array(skip, np.int64), take, np.cumsum(take) - take
    )


def records_of(pieces):
    """(file, number of the record in the file, index in the split) of all records."""
    records = []
    for filename, skip, take, first in zip(*pieces, strict=True):
        records += [(filename, int(skip + i), int(first + i)) for i in range(take)]
    return records


def test_shares_of_processes_are_a_partition():
    pieces = make_pieces(['a', 'b', 'c', 'd'], [2, 0, 0, 3], [5, 0, 7, 1])
    whole = records_of(pieces)
    for count in (1, 2, 3, 5, 20):
        shares = [records_of(pieces.share(p, count)) for p in range(count)]
        assert sum(shares, []) == whole
        lengths = {len(share) for share in shares}
        assert lengths <= {13 // count, -(-13 // count)}


@pytest.mark.slow
def test_a_stream_may_start_in_any_segment_and_window(monkeypatch):
    """Each stream equals the rest of the stream from the beginning."""
    lengths = np.random.default_rng(0).integers(0, 5, 40)  # 40 files are three segments
    lengths[7] = 3
    pieces = make_pieces(['unused'] * 40, lengths * 0, lengths)
    total = int(lengths.sum())
    monkeypatch.setattr(tf.data, 'TFRecordDataset', lambda name: tf.data.Dataset.range(100))

    def stream(start, count):
        items = sequential.shuffled(
            pieces,
            start,
            seed=1,
            window=9,
            files_at_once=16,
            replace=lambda i: tf.range(tf.size(i, tf.int64)),
        )
        return [int(item['index']) for item in items.take(count)]

    whole = stream(0, 3 * total)
    for epoch in range(3):
        assert sorted(whole[epoch * total : (epoch + 1) * total]) == list(range(total))
    for start in (1, 8, 9, 10, total // 2, total - 1, total, 2 * total - 3, 2 * total + 40):
        assert stream(start, 3 * total - start) == whole[start:]


@pytest.mark.parametrize('start', [0, 17, COUNT - 1])
def test_in_order_may_start_anywhere(start, tmp_path):
    source = make('tfrecord', tmp_path).source()
    items = sequential.in_order(source.pieces, start, 16)
    indices = sorted(int(item['index']) for item in items)
    whole = [int(item['index']) for item in sequential.in_order(source.pieces, 0, 16)]
    assert indices == sorted(whole[start:])
    assert sorted(whole) == list(range(COUNT))


def test_mean_size_of_records_is_read_from_the_files(tmp_path):
    names = []
    for size in (10, 30):
        names.append(str(tmp_path / str(size)))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for number in range(40):
                writer.write(bytes(size if number >= 4 else 1000))
    pieces = make_pieces(names, [4, 4], [36, 36])
    assert sequential.bytes_per_record(pieces) == 20


def test_files_of_one_epoch_are_mixed(tmp_path):
    """Neighbours in the stream come from different files, even with a window of one record."""
    batches = make('tfrecord', tmp_path, shuffle_buffer=1).batches(7)
    shown = np.array(numbers(batches))[:COUNT]
    assert np.mean(np.abs(np.diff(shown)) == 1) < 0.1
