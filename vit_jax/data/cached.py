"""Photos of a directory, decoded and resized once and kept as pixels, which are fast to read.

Each has a BMP file in a folder, uncompressed, named by a hash of all that its pixels depend on:
path, size and time of the photo, and the short side. A photo that has changed gets another file.

A file has a checksum of its content, which is compared every time that the file is read. Reading
all files at the start to compare them would take hours for large sets. A file that is damaged, or
was written by a version without checksums, is made again.
"""

import concurrent.futures
import contextlib
import hashlib
import io
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image

from vit_jax.data.host_tensorflow import tf
from vit_jax.data.preprocess import decode_image, resize
from vit_jax.data.source import Source, WrappedSource, has_local_files
from vit_jax.data.tensorflow_errors import STORAGE_ERRORS, reason
from vit_jax.errors import UserError
from vit_jax.files import cache_folder, written_whole

logger = logging.getLogger('vit_jax.data')

_VERSION = 1  # of what follows
# Of a BMP: name, bytes, checksum, where pixels begin, 40, width, height, 1, bits of a pixel, no
# compression, bytes of the pixels. The format reserves the place of the checksum for programs, and
# decoders pass over it. Versions without a checksum have 0 there.
_HEADER = struct.Struct('<2s5IiHHII')
_CHECKSUM_AT = 6  # bytes before it
_CONTENT_AT = 10  # bytes before what it is computed from
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
    number = source.num_examples
    if not has_local_files(source):
        raise UserError(
            f'dataset.cache is disk, and {source.name_of(0)} is no file of this machine: expected '
            'a directory of image files as dataset.name, or dataset.cache=none.'
        )
    folder = os.path.abspath(os.path.expanduser(folder) if folder else cache_folder('photos'))
    photos = source.fetch(tf.range(number, dtype=tf.int64))['path'].numpy()
    paths = photos.copy()
    broken = {}  # why, by index
    todo = np.roll(np.arange(number), -(number * share[0] // share[1]))
    todo = todo[~np.isin(todo, list(source.unreadable))]  # pipes, which could block
    _pixels.get_concrete_function()  # now, because TensorFlow warns of several threads that trace
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            said = time.monotonic()
            for done in range(0, len(todo), _PART):
                check()
                part = todo[done : done + _PART]
                files = pool.map(lambda photo: _file_of(photo, folder, short_side), photos[part])
                for index, (path, problem) in zip(part, files, strict=True):
                    paths[index] = path
                    if problem:
                        broken[int(index)] = problem
                if done + len(part) == len(todo) or time.monotonic() - said >= _SILENCE:
                    said = time.monotonic()
                    logger.info(
                        'dataset.cache: %d of %d photos are in %s',
                        done + len(part),
                        len(todo),
                        folder,
                    )
    except OSError as error:
        raise _cannot_be_kept(folder, error) from error
    return CachedSource(source, photos, paths, broken, folder, short_side)


def _cannot_be_kept(folder, error):
    return UserError(
        f'dataset.cache: photos cannot be kept in {folder} ({error}). They take 3 '
        'bytes a pixel: make room, lower dataset.cache_size, or name another '
        'folder as dataset.cache_dir.',
        kind='unwritable',
        field='dataset.cache_dir',
        file=folder,
    )


class CachedSource(WrappedSource):
    """A source that reads files of a folder in place of photos.

    Args:
      photos, paths: of each example, the photo and the file that is read, which is the photo itself
        where there is no other.
      broken: why a photo is broken, by index.
      folder, short_side: as those of `cached`.
    """

    def __init__(
        self,
        source: Source,
        photos: np.ndarray,
        paths: np.ndarray,
        broken: Mapping[int, str],
        folder: str,
        short_side: int,
    ):
        super().__init__(source)
        self.unreadable = source.unreadable | dict(broken)
        self._photos = photos
        self._paths = paths
        self._folder = folder
        self._short_side = short_side
        self._restored: set[int] = set()  # indices of files that were made again
        self._path_table = tf.constant(list(paths))
        self._is_kept = tf.constant(paths != photos)

    def fetch(self, indices):
        return self.source.fetch(indices) | {
            'path': tf.gather(self._path_table, indices),
            'is_kept': tf.gather(self._is_kept, indices),
        }

    def load(self, item):
        encoded, label = self.source.load(item)
        encoded = tf.cond(item['is_kept'], lambda: _checked(encoded), lambda: encoded)
        return encoded, label

    def restore(self, index):
        path = os.fsdecode(self._paths[index])
        photo = os.fsdecode(self._photos[index])
        if path == photo or _is_intact(path):
            return False
        if index in self._restored:
            raise UserError(
                f'{path}, in which dataset.cache=disk keeps the pixels of {photo}, is damaged '
                'again after it was made again: check the disk, or name another folder as '
                'dataset.cache_dir.',
                kind='content',
                field='dataset.cache_dir',
                file=path,
            )
        self._restored.add(index)
        try:
            made, problem = _file_of(
                self._photos[index], self._folder, self._short_side, again=True
            )
        except OSError as error:
            raise _cannot_be_kept(self._folder, error) from error
        if made != self._paths[index]:
            raise UserError(
                f'{path}, in which dataset.cache=disk kept the pixels of {photo}, is damaged or '
                f'gone, and the photo {problem or "has changed"} since the run started: restore '
                'the photo, or run the same command again.',
                kind='content',
                file=photo,
            )
        logger.warning(
            '%s was damaged or gone: the pixels of %s are made again',
            path,
            self.source.name_of(index),
        )
        return True


def _file_of(photo, folder, short_side, again=False):
    """The file that is read in place of a photo, and ''.

    Of a broken photo it is the photo itself, with the reason. With `again`, a file that is there is
    replaced.
    """
    try:
        found = os.stat(photo)
    except (FileNotFoundError, PermissionError) as error:
        return photo, f'cannot be read ({error.strerror})'
    made_of = (_VERSION, os.path.abspath(photo), found.st_size, found.st_mtime_ns, short_side)
    key = hashlib.blake2b(repr(made_of).encode(), digest_size=20).hexdigest()
    path = os.path.join(folder, key[:2], f'{key[2:]}.bmp')
    if again or not _is_whole(path):
        try:
            pixels = _pixels(photo, short_side).numpy()
        except STORAGE_ERRORS:
            raise  # the photo may be good, and its own pixels would change the run
        except tf.errors.OpError as error:
            return photo, reason(error)
        _write(path, Image.fromarray(pixels))
    return os.fsencode(path), ''


def _checksum(encoded):
    """1 to 2**32 - 1, a function of the bytes of a file behind its own checksum.

    TensorFlow promises that this function (FarmHash) never changes.
    """
    content = tf.strings.substr(encoded, _CONTENT_AT, -1)
    return tf.strings.to_hash_bucket_fast(content, 2**32 - 1) + 1


def _checked(encoded):
    """The content of a file, inside the input graph; the operation fails unless it is intact."""
    stated = tf.strings.substr(encoded, _CHECKSUM_AT, 4) + bytes(4)
    is_intact = _checksum(encoded) == tf.io.decode_raw(stated, tf.int64)[0]
    with tf.control_dependencies([tf.debugging.Assert(is_intact, ['a kept photo is damaged'])]):
        return tf.identity(encoded)


def _is_intact(path):
    """Whether there is a whole file with the right checksum."""
    if not _is_whole(path):
        return False
    with open(path, 'rb') as file:
        content = file.read()
    stated = _HEADER.unpack(content[: _HEADER.size])[2]
    return int(_checksum(tf.constant(content))) == stated


def _is_whole(path):
    """Whether there is such a file, with the header and the size of its image."""
    with contextlib.suppress(FileNotFoundError, struct.error), open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        found = _HEADER.unpack(file.read(_HEADER.size))
        checksum = found[2]
        width, height = found[5:7]
        pixels = -(-3 * width // 4) * 4 * height  # lines are filled up to four bytes
        expected = (b'BM', size, checksum, size - pixels, 40, width, height, 1, 24, 0, pixels)
        return checksum != 0 and found == expected
    return False


def _write(path, image):
    """Writes a file of which other processes see all or nothing, also if this one is killed."""
    content = io.BytesIO()
    image.save(content, 'BMP')  # in a file, Pillow would not notice a disk that is almost full
    encoded = bytearray(content.getvalue())
    checksum = int(_checksum(tf.constant(bytes(encoded))))
    struct.pack_into('<I', encoded, _CHECKSUM_AT, checksum)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with written_whole(path, is_shared=True) as temporary, open(temporary, 'wb') as file:
        file.write(encoded)


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
