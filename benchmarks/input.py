"""Compares the images per second of the training input with vision_transformer's operations.

    python benchmarks/input.py PHOTOS [--rounds=9] [--seconds=3] [--batch_size=64] [--ways=disk,...]

PHOTOS is a directory, whose JPEG files are copied and resized to 512x384 pixels. The program
compares these ways of reading them:

- vit_jax: the pipeline of configs/vit.py;
- antialiased: with preprocess.antialias=True;
- disk: with dataset.cache=disk;
- disk256: with dataset.cache=disk of photos with a short side of 256 pixels;
- vision_transformer: the operations of vision_transformer's input, image by image;
- crop: decoding and resizing the crop alone, about the peak of TensorFlow's decoder.

Each way has its own process, and they alternate in rounds of a few seconds. The program prints the
median, slowest and fastest round, and the median ratio to vision_transformer in the same round. All
numbers are given per second of wall time and per second of processor time. Other programs on the
machine disturb processor time less.
"""

import argparse
import math
import multiprocessing
import pathlib
import random
import statistics
import tempfile
import time

from PIL import Image

from vit_jax import cli, machine
from vit_jax.data import cached, pipeline, sources
from vit_jax.data.host_tensorflow import tf
from vit_jax.workdir import memory

SIZE = (224, 224)


def write_copies(photos, folder):
    """Writes photos to FOLDER/photos/train/{a,b}/N.jpg, with 512x384 pixels."""
    paths = sorted(p for p in pathlib.Path(photos).rglob('*') if p.suffix.lower() == '.jpg')[:256]
    for number, path in enumerate(paths):
        target = pathlib.Path(folder, 'photos', 'train', 'ab'[number % 2], f'{number:03}.jpg')
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).convert('RGB').resize((512, 384)).save(target, quality=90)
    if not paths:
        raise SystemExit(f'{photos} has no .jpg file: expected a directory of photos.')


def ours(folder, batch_size, *fields):
    """Returns vit_jax's batches for configs/vit.py; `fields` are options that change it."""
    config = cli.read_config(['--config=configs/vit.py:b16', *fields])
    source = sources.open_source(f'{folder}/photos', 'train')
    if config.dataset.cache == 'disk':
        start = time.perf_counter()
        source = cached.cached(source, f'{folder}/pixels', config.dataset.cache_size)
        print(
            f'Wrote the pixels of {source.num_examples} photos with cache_size='
            f'{config.dataset.cache_size} in {time.perf_counter() - start:.2f} s'
        )
    settings = pipeline.TrainSettings(
        batch_size=batch_size,
        image_size=SIZE,
        seed=0,
        augment=config.augment,
        preprocess=config.preprocess,
        shuffle_buffer=0,
        files_at_once=1,
        max_broken_fraction=0.0,
    )
    return pipeline.train_batches(source, settings)


def plain(folder, batch_size, function):
    """Returns batches of function(bytes of a file), by a simple tf.data program."""
    files = tf.data.Dataset.list_files(f'{folder}/photos/train/*/*.jpg', shuffle=False)
    files = files.repeat().shuffle(1000, seed=0)
    images = files.map(
        lambda path: function(tf.io.read_file(path)), num_parallel_calls=tf.data.AUTOTUNE
    )
    return images.batch(batch_size).prefetch(2).as_numpy_iterator()


def random_box(shape):
    """Returns (begin, size) of a random crop, which both programs draw in the same way."""
    return tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros([0, 0, 4]),
        min_object_covered=0.0,
        area_range=(0.05, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        use_image_if_no_bounding_boxes=True,
    )[:2]


def vision_transformer(encoded):
    """Decodes, crops, resizes, flips and scales an image to [-1, 1]."""
    image = tf.io.decode_jpeg(encoded, 3)
    image = tf.image.resize(tf.slice(image, *random_box(tf.shape(image))), SIZE)
    return (tf.image.random_flip_left_right(image) - 127.5) / 127.5


def crop_alone(encoded):
    """Decodes only a crop and resizes it."""
    begin, size = random_box(tf.io.extract_jpeg_shape(encoded))
    image = tf.io.decode_and_crop_jpeg(encoded, tf.concat([begin[:2], size[:2]], 0), 3)
    return tf.image.resize(image, SIZE)


DISK = '--config.dataset.cache=disk'
PEER = 'vision_transformer'
# The values of --ways, with a function (folder, batch size, ...) and its further arguments.
WAYS = {
    'vit_jax': (ours,),
    'antialiased': (ours, '--config.preprocess.antialias=True'),
    'disk': (ours, DISK),
    'disk256': (ours, DISK, '--config.dataset.cache_size=256'),
    PEER: (plain, vision_transformer),
    'crop': (plain, crop_alone),
}


def rates(batches, seconds, batch_size):
    """Returns images per second of wall time, and of processor time over all processors.

    The first batches do not count, because they were prefetched before. At the end the function
    waits until prefetching stops, so that it does not slow down the next process.
    """
    for _ in range(10):
        next(batches)
    images = 0
    start = time.perf_counter()
    processor_start = time.process_time()
    while time.perf_counter() < start + seconds:
        next(batches)
        images += batch_size
    elapsed = time.perf_counter() - start
    processor_seconds = time.process_time() - processor_start
    time.sleep(1)
    return images / elapsed, images / (processor_seconds / machine.cores())


def serve(name, folder, batch_size, seconds, connection):
    """Runs in its own process: sends the seconds until the first batch, then rates on request."""
    machine.keep_memory()  # like training
    way, *settings = WAYS[name]
    batches = way(folder, batch_size, *settings)
    start = time.perf_counter()
    next(batches)
    first = time.perf_counter() - start
    rates(batches, 3 * seconds, batch_size)  # the first epoch is slower
    connection.send((first, memory.peak_resident()))
    while connection.recv():
        connection.send(rates(batches, seconds, batch_size))


def start(context, *arguments):
    """Starts a daemon process that serves a way, and returns the connection to it."""
    connection, process_end = context.Pipe()
    context.Process(target=serve, args=(*arguments, process_end), daemon=True).start()
    process_end.close()  # so that recv fails if the process fails
    first, resident = connection.recv()
    print(
        f'{arguments[0]:20} first batch after {first:.2f} s, peak memory of the process '
        f'{resident / 1e9:.3f} GB',
        flush=True,
    )
    return connection


def report(rates_of_ways):
    """Prints the table of {way: [rates of each round]}."""
    for name, rates_of_rounds in rates_of_ways.items():
        wall_rates, processor_rates = zip(*rates_of_rounds, strict=True)
        line = (
            f'{name:20} {statistics.median(wall_rates):7,.0f} ({min(wall_rates):,.0f} - '
            f'{max(wall_rates):,.0f}) images/s, {statistics.median(processor_rates):7,.0f} by '
            'processor time'
        )
        if PEER in rates_of_ways:
            peer_wall_rates, peer_processor_rates = zip(*rates_of_ways[PEER], strict=True)
            wall_ratio = median_ratio(wall_rates, peer_wall_rates)
            processor_ratio = median_ratio(processor_rates, peer_processor_rates)
            line += f'; {wall_ratio:.2f} and {processor_ratio:.2f} times {PEER}'
        print(line)


def median_ratio(rates, peer_rates):
    """Returns the median over rounds of the ratio of two rates."""
    return statistics.median(
        rate / peer_rate for rate, peer_rate in zip(rates, peer_rates, strict=True)
    )


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('photos', help='directory of JPEG files')
    parser.add_argument('--rounds', type=int, default=9, help='number of rounds')
    parser.add_argument('--seconds', type=float, default=3.0, help='length of a turn in a round')
    parser.add_argument('--batch_size', type=int, default=64, help='number of images in a batch')
    parser.add_argument('--ways', default=','.join(WAYS), help='ways to compare')
    options = parser.parse_args()
    names = options.ways.split(',')
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        parser.error(f'--ways has {", ".join(unknown)}: expected some of {",".join(WAYS)}')
    if options.rounds < 1:
        parser.error(f'--rounds is {options.rounds}: expected at least 1')
    if not 0 < options.seconds < math.inf:
        parser.error(f'--seconds is {options.seconds}: expected a finite number above 0')
    if options.batch_size < 1:
        parser.error(f'--batch_size is {options.batch_size}: expected at least 1')
    random_order = random.Random(0)
    context = multiprocessing.get_context('spawn')
    with tempfile.TemporaryDirectory() as folder:
        write_copies(options.photos, folder)
        connections = {
            name: start(context, name, folder, options.batch_size, options.seconds)
            for name in names
        }
        rates_of_ways = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in random_order.sample(names, len(names)):
                connections[name].send(True)
                rates_of_ways[name].append(connections[name].recv())
    report(rates_of_ways)


if __name__ == '__main__':
    main()
