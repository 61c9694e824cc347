"""Images per second of the training input, beside vision_transformer's operations on one machine.

    python benchmarks/input.py PHOTOS [--rounds=9] [--seconds=3] [--batch_size=64] [--ways=disk,...]

PHOTOS is a directory; its JPEG files are copied as 512x384 ones. In turn, a few seconds each, each
in a process of its own: vit_jax's own pipeline with configs/vit.py, antialiased, and with
dataset.cache=disk of photos as they are and of ones with a short side of 256 pixels; the operations
that vision_transformer's input is made of, written here for one image after another; and decoding
the crop and resizing it alone, which is about the most that TensorFlow's decoder gives. Prints the
median, slowest and fastest round, and the median of how many times vision_transformer's they are in
the same round, by images per second of the clock and, which other programs on the machine disturb
less, per second of processor time.
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


def copies(photos, folder):
    """The photos as FOLDER/photos/train/{a,b}/N.jpg of 512x384 pixels."""
    paths = sorted(p for p in pathlib.Path(photos).rglob('*') if p.suffix.lower() == '.jpg')[:256]
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
        print(
            f'{source.num_examples} photos were written as pixels of a short side of '
            f'{config.dataset.cache_size} (0: their own) in {time.perf_counter() - start:.2f} s'
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
    """Batches of `function` of the bytes of a file, as a simple tf.data program makes them."""
    files = tf.data.Dataset.list_files(f'{folder}/photos/train/*/*.jpg', shuffle=False)
    files = files.repeat().shuffle(1000, seed=0)
    images = files.map(
        lambda path: function(tf.io.read_file(path)), num_parallel_calls=tf.data.AUTOTUNE
    )
    return images.batch(batch_size).prefetch(2).as_numpy_iterator()


def random_box(shape):
    """Begin and size of a crop, as both programs draw it."""
    return tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros([0, 0, 4]),
        min_object_covered=0.0,
        area_range=(0.05, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        use_image_if_no_bounding_boxes=True,
    )[:2]


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


DISK = '--config.dataset.cache=disk'
PEER = 'vision_transformer'
# Of --ways.
WAYS = {
    'vit_jax': (ours,),
    'antialiased': (ours, '--config.preprocess.antialias=True'),
    'disk': (ours, DISK),
    'disk256': (ours, DISK, '--config.dataset.cache_size=256'),
    PEER: (plain, vision_transformer),
    'crop': (plain, crop_alone),
}


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
    return images / elapsed, images / (used / machine.cores())


def serve(name, folder, batch_size, seconds, connection):
    """In a process of its own: seconds until the first batch, then rates whenever it is asked."""
    machine.keep_memory()  # as training does
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
    """The connection to a process that serves a way, which ends with this one."""
    here, there = context.Pipe()
    context.Process(target=serve, args=(*arguments, there), daemon=True).start()
    there.close()  # so that one which fails ends this one, too
    first, resident = here.recv()
    print(
        f'{arguments[0]:20} first batch after {first:.2f} s, its process has had '
        f'{resident / 1e9:.3f} GB at most',
        flush=True,
    )
    return here


def report(found):
    """Prints the table of {way: [rates of each round]}."""
    for name, rounds in found.items():
        clock, processors = zip(*rounds, strict=True)
        line = (
            f'{name:20} {statistics.median(clock):7,.0f} ({min(clock):,.0f} - {max(clock):,.0f}'
            f') images/s, {statistics.median(processors):7,.0f} by processor time'
        )
        if PEER in found:
            times = [
                statistics.median(
                    mine[k] / theirs[k] for mine, theirs in zip(rounds, found[PEER], strict=True)
                )
                for k in (0, 1)
            ]
            line += f'; {times[0]:.2f} and {times[1]:.2f} times {PEER}'
        print(line)


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('photos')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--seconds', type=float, default=3.0)
    parser.add_argument('--batch_size', type=int, default=64)
    parser.add_argument('--ways', default=','.join(WAYS))
    given = parser.parse_args()
    names = given.ways.split(',')
    if unknown := [name for name in names if name not in WAYS]:
        parser.error(f'--ways has {", ".join(unknown)}: expected some of {",".join(WAYS)}')
    if given.rounds < 1 or not 0 < given.seconds < math.inf:
        parser.error(
            f'--rounds={given.rounds} --seconds={given.seconds}: expected at least 1 '
            'round and a finite number of seconds above 0'
        )
    if given.batch_size < 1:
        parser.error(f'--batch_size={given.batch_size}: expected at least 1 image')
    order, context = random.Random(0), multiprocessing.get_context('spawn')
    with tempfile.TemporaryDirectory() as folder:
        copies(given.photos, folder)
        started = {
            name: start(context, name, folder, given.batch_size, given.seconds) for name in names
        }
        found = {name: [] for name in names}
        for _ in range(given.rounds):
            for name in order.sample(names, len(names)):
                started[name].send(True)
                found[name].append(started[name].recv())
    report(found)


if __name__ == '__main__':
    main()
