"""Images per second of the training input, beside vision_transformer's operations on one machine.

    python benchmarks/input.py PHOTOS [--rounds=5] [--seconds=4] [--batch_size=64] [--only=NAME]

PHOTOS is a directory; its JPEG files are copied as 512x384 ones. In turn, a few seconds each:
vit_jax's own pipeline with configs/vit.py, also with dataset.cache=disk, of photos as they are and
of ones with a short side of 256 pixels; the operations that vision_transformer's input is made
of, written here for one image after another; and decoding the crop and resizing it alone, which is
about the most that TensorFlow's decoder gives. Prints the median and all rounds, images per second
of the clock and, which other programs on the machine disturb less, per second of all processors.
With --only=NAME, a name of the table, that way alone has the process.
"""

import argparse
import os
import pathlib
import statistics
import tempfile
import time

import tensorflow as tf
from PIL import Image

from vit_jax import cli, machine
from vit_jax.data import cached, pipeline, sources
from vit_jax.measuring import memory

SIZE = (224, 224)


def copies(photos, folder, count=256):
    """The photos as FOLDER/photos/train/{a,b}/N.jpg of 512x384 pixels."""
    paths = sorted(p for p in pathlib.Path(photos).rglob('*') if p.suffix.lower() == '.jpg')[:count]
    for number, path in enumerate(paths):
        target = pathlib.Path(folder, 'photos', 'train', 'ab'[number % 2], f'{number:03}.jpg')
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).convert('RGB').resize((512, 384)).save(target, quality=90)
    if not paths:
        raise SystemExit(f'no .jpg file below {photos}')


def ours(folder, batch_size, *fields):
    """vit_jax's batches with configs/vit.py, with other `fields` if any are given."""
    config = cli.read_config(['--config=configs/vit.py:b16', *fields])
    source = sources.open_source(f'{folder}/photos', 'train')
    if config.dataset.cache == 'disk':
        start = time.perf_counter()
        source = cached.cached(source, f'{folder}/pixels', config.dataset.cache_size)
        print(f'{source.num_examples} photos were written as pixels of a short side of '
              f'{config.dataset.cache_size} (0: their own) in {time.perf_counter() - start:.2f} s')
    return pipeline.train_batches(
        source, batch_size=batch_size, image_size=SIZE, seed=0,
        augment=config.augment, preprocess=config.preprocess, shuffle_buffer=0, files_at_once=1,
        max_broken_fraction=0.0)


def plain(folder, batch_size, function):
    """Batches of `function` of the bytes of a file, as a simple tf.data program makes them."""
    files = tf.data.Dataset.list_files(f'{folder}/photos/train/*/*.jpg', shuffle=False)
    files = files.repeat().shuffle(1000, seed=0)
    images = files.map(lambda path: function(tf.io.read_file(path)),
                       num_parallel_calls=tf.data.AUTOTUNE)
    return images.batch(batch_size).prefetch(2).as_numpy_iterator()


def random_box(shape):
    """Begin and size of a crop, as both programs draw it."""
    return tf.image.sample_distorted_bounding_box(
        shape, tf.zeros([0, 0, 4]), min_object_covered=0.0, area_range=(0.05, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3), use_image_if_no_bounding_boxes=True)[:2]


def vision_transformer(encoded):
    """Decode, crop, resize, flip and scale to -1..1."""
    image = tf.io.decode_jpeg(encoded, 3)
    image = tf.image.resize(tf.slice(image, *random_box(tf.shape(image))), SIZE)
    return (tf.image.random_flip_left_right(image) - 127.5) / 127.5


def crop_alone(encoded):
    """Decode the crop and resize it."""
    begin, size = random_box(tf.io.extract_jpeg_shape(encoded))
    image = tf.io.decode_and_crop_jpeg(encoded, tf.concat([begin[:2], size[:2]], 0), 3)
    return tf.image.resize(image, SIZE)


def rates(batches, seconds, batch_size):
    """Images per second of the clock, and of all processors together.

    What was made before is taken before; what is made ahead is awaited after, lest the next pay it.
    """
    for _ in range(10):
        next(batches)
    images, start, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < start + seconds:
        next(batches)
        images += batch_size
    elapsed, used = time.perf_counter() - start, time.process_time() - used
    time.sleep(1)
    return images / elapsed, images / (used / os.cpu_count())


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('photos')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=4.0)
    parser.add_argument('--batch_size', type=int, default=64)
    parser.add_argument('--only')
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copies(given.photos, folder)
        machine.keep_memory()  # as training does
        disk = '--config.dataset.cache=disk'
        ways = {'vit_jax': (ours,),
                'vit_jax, antialiased': (ours, '--config.preprocess.antialias=True'),
                'vit_jax, cache=disk': (ours, disk),
                'vit_jax, cache=disk, 256': (ours, disk, '--config.dataset.cache_size=256'),
                "vision_transformer's operations": (plain, vision_transformer),
                'crop and resize alone': (plain, crop_alone)}
        if given.only:
            if given.only not in ways:
                parser.error(f'--only={given.only!r}: expected one of {list(ways)}')
            ways = {given.only: ways[given.only]}
        # In turn, so that the first line of memory is that of one pipeline in a process.
        for name, (way, *settings) in ways.items():
            ways[name] = batches = way(folder, given.batch_size, *settings)
            start = time.perf_counter()
            next(batches)
            first = time.perf_counter() - start
            rates(batches, 3 * given.seconds, given.batch_size)  # the first epoch is slower
            print(f'{name:32} first batch after {first:.2f} s, process has had '
                  f'{memory.peak_resident() / 1e9:.2f} GB at most', flush=True)
        found = {name: [] for name in ways}
        for _ in range(given.rounds):
            for name, batches in ways.items():
                found[name].append(rates(batches, given.seconds, given.batch_size))
    for name, pairs in found.items():
        clock, processors = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f'{name:32} {clock:7,.0f} images/s  {processors:7,.0f} by processor time  '
              f'{[round(pair[0]) for pair in pairs]}')


if __name__ == '__main__':
    main()
