"""Times reading, decoding and resizing photos with and without a check for regular files.

The package has no such check while a run trains: docs/lab-notes/reliability.md has the reason.

    python benchmarks/checked_reads.py FOLDER [--rounds=14]

FOLDER has CLASS/photo.jpg files. Each round reads all photos once in each way, one after the other.
"""

import argparse
import glob
import os
import statistics
import time

from vit_jax.data.host_tensorflow import tf
from vit_jax.files import require_regular


def checked_read(path):
    """The bytes of a photo; the operation fails for a pipe or a device."""

    def checked(path):
        require_regular(os.fsdecode(path))
        return path

    return tf.io.read_file(tf.numpy_function(checked, [path], tf.string, stateful=False))


def seconds(paths, read):
    """Seconds to read, decode and resize all photos, as batches."""

    def image(path):
        return tf.image.resize(tf.io.decode_jpeg(read(path), 3), [224, 224])

    batches = tf.data.Dataset.from_tensor_slices(paths).map(image, num_parallel_calls=2).batch(32)
    begin = time.perf_counter()
    for _ in batches.prefetch(2):
        pass
    return time.perf_counter() - begin


def main():
    """Prints the ratio of each pair, and of the fastest rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder')
    parser.add_argument('--rounds', type=int, default=14)
    options = parser.parse_args()
    paths = sorted(glob.glob(os.path.join(options.folder, '*', '*.jpg')))
    pairs = []
    for _ in range(options.rounds):
        pairs.append((seconds(paths, tf.io.read_file), seconds(paths, checked_read)))
    ratios = sorted(checked / plain for plain, checked in pairs)
    fastest = min(checked for _, checked in pairs) / min(plain for plain, _ in pairs)
    print('ratios of pairs:', ', '.join(f'{ratio:.2f}' for ratio in ratios))
    print(f'median {statistics.median(ratios):.2f}, ratio of the fastest rounds {fastest:.2f}')


if __name__ == '__main__':
    main()
