"""Photos of a directory, decoded and resized once and kept as pixels, which are fast to read.

Each has a BMP file in a folder, uncompressed, named by a hash of all that its pixels depend on:
path, size and time of the photo, and the short side. A photo that has changed gets another file.
"""

import concurrent.futures
import contextlib
import copy
import hashlib
import io
import logging
import os
import struct
import time
import uuid
from collections.abc import Callable

import numpy as np
from PIL import Image

from vit_jax.data.broken import STORAGE_ERRORS
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.preprocess import decode_image, resize
from vit_jax.data.sources import Source
from vit_jax.errors import UserError

logger = logging.getLogger('vit_jax.data')

_VERSION = 1  # of what follows
# Of a BMP: name, bytes, 0, where pixels begin, 40, width, height, 1, bits of a pixel, no
# compression, bytes of the pixels.
_HEADER = struct.Struct('<2s5IiHHII')
_PART = 500  # photos between two calls of `check`
_SILENCE = 20  # seconds from one line of the log to the next


def cached(
    source: Source,
    folder: str,
    short_side: int,
    share: tuple[int, int] = (0, 1),
    check: Callable[[], None] = lambda: None,
) -> Source:
    """The source, reading its photos from a folder in which those that are missing are made first.

    Args:
      folder: '' is vit_jax/photos of $XDG_CACHE_HOME, else of ~/.cache.
      short_side: pixels to which larger photos are reduced; 0: photos keep their size.
      share: (index of this process, number of processes), which begin at different photos. Each
        ends when it has all of them, whatever disk the others have.
      check: called again and again; what it raises ends the work.

    Raises UserError for a source without local files, and where the folder cannot have them.
    """
    number, first = source.num_examples, source.name_of(0)
    has_files = source.pieces is None and 'path' in source.fetch(tf.zeros([0], tf.int64))
    if not has_files or '://' in first:
        raise UserError(
            f'dataset.cache is disk, and {first} is no file of this machine: expected '
            'a directory of image files as dataset.name, or dataset.cache=none.'
        )
    folder = os.path.abspath(
        os.path.expanduser(folder)
        or os.path.join(
            os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'vit_jax', 'photos'
        )
    )
    paths = source.fetch(tf.range(number, dtype=tf.int64))['path'].numpy()
    todo = np.roll(np.arange(number), -(number * share[0] // share[1]))
    todo = todo[~np.isin(todo, list(source.unreadable))]  # pipes, which could block
    _pixels.get_concrete_function()  # now, because TensorFlow warns of several threads that trace
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            said = time.monotonic()
            for done in range(0, len(todo), _PART):
                check()
                part = todo[done : done + _PART]
                paths[part] = list(
                    pool.map(lambda photo: _file_of(photo, folder, short_side), paths[part])
                )
                if done + len(part) == len(todo) or time.monotonic() - said >= _SILENCE:
                    said = time.monotonic()
                    logger.info(
                        'dataset.cache: %d of %d photos are in %s',
                        done + len(part),
                        len(todo),
                        folder,
                    )
    except OSError as error:
        raise UserError(
            f'dataset.cache: photos cannot be kept in {folder} ({error}). They take 3 '
            'bytes a pixel: make room, lower dataset.cache_size, or name another '
            'folder as dataset.cache_dir.'
        ) from error
    result, table = copy.copy(source), tf.constant(list(paths))
    result.fetch = lambda indices: source.fetch(indices) | {'path': tf.gather(table, indices)}
    return result


def _file_of(photo, folder, short_side):
    """The file that is read in place of a photo: itself if it is broken, as training will find."""
    try:
        found = os.stat(photo)
    except (FileNotFoundError, PermissionError):
        return photo
    made_of = (_VERSION, os.path.abspath(photo), found.st_size, found.st_mtime_ns, short_side)
    key = hashlib.blake2b(repr(made_of).encode(), digest_size=20).hexdigest()
    path = os.path.join(folder, key[:2], f'{key[2:]}.bmp')
    if not _is_whole(path):
        try:
            pixels = _pixels(photo, short_side).numpy()
        except STORAGE_ERRORS:
            raise  # the photo may be good, and its own pixels would change the run
        except tf.errors.OpError:
            return photo
        _write(path, Image.fromarray(pixels))
    return os.fsencode(path)


def _is_whole(path):
    """Whether there is such a file, with the header and the size of its image."""
    with contextlib.suppress(FileNotFoundError, struct.error), open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        found = _HEADER.unpack(file.read(_HEADER.size))
        width, height = found[5:7]
        pixels = -(-3 * width // 4) * 4 * height  # lines are filled up to four bytes
        return found == (b'BM', size, 0, size - pixels, 40, width, height, 1, 24, 0, pixels)
    return False


def _write(path, image):
    """Writes a file of which other processes see all or nothing, also if this one is killed."""
    content, temporary = io.BytesIO(), f'{path}.{uuid.uuid4().hex}'
    image.save(content, 'BMP')  # in a file, Pillow would not notice a disk that is almost full
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(temporary, 'wb') as file:
            file.write(content.getbuffer())
        os.replace(temporary, path)
    finally:  # it is gone unless that failed
        with contextlib.suppress(OSError):
            os.remove(temporary)


# A graph, because in one Python functions get the bytes that they get in training.
@tf.function(
    autograph=False, input_signature=[tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)]
)
def _pixels(photo, short_side):
    image = decode_image(tf.io.read_file(photo))
    size = tf.shape(image, tf.int64)[:2]
    short = tf.reduce_min(size)
    side = tf.where(short_side > 0, tf.minimum(short_side, short), short)
    size = tf.cast((2 * size * side + short) // (2 * short), tf.int32)
    reduced = resize(image, size, {'resize': 'bilinear', 'antialias': True, 'uint8_resize': False})
    return tf.cast(tf.round(reduced), tf.uint8)
