"""A cache of decoded and resized photos, as files of pixels that are fast to read.

Each photo has an uncompressed BMP file in a folder. The name of the file is a hash of everything
that the pixels depend on: path, size and time of the photo, and the short side. A photo that
changes gets another file.

A file contains a checksum of its content, which is verified whenever the file is read. Verifying
all files at the start would take hours for large sets. A file is rebuilt if it is damaged, or if a
version without checksums wrote it.
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

_VERSION = 1  # of the format of the files
# The header of a BMP file: name, bytes, checksum, offset of the pixels, 40, width, height, 1, bits
# of a pixel, no compression, bytes of the pixels. The format reserves the place of the checksum for
# programs, and decoders ignore it. Versions without a checksum have 0 there.
_HEADER = struct.Struct('<2s5IiHHII')
_CHECKSUM_OFFSET = 6
_CONTENT_OFFSET = 10  # the checksum covers the bytes from here on
_PART = 500  # photos between two calls of `check`
_SILENCE = 20  # seconds between two lines of the log


def cached(
    source: Source,
    folder: str,
    short_side: int,
    share: tuple[int, int] = (0, 1),
    check: Callable[[], None] = lambda: None,
) -> Source:
    """The source, with photos that are read from the cache folder; missing files are written first.

    Args:
      folder: the cache folder; '' is vit_jax/photos in $XDG_CACHE_HOME or, if it is not set, in
        ~/.cache.
      short_side: larger photos are reduced to this many pixels on their short side; 0 keeps sizes.
      share: (index of this process, number of processes). Each process starts at another photo, and
        ends when all files exist on its own disk.
      check: called repeatedly; an exception from it ends the work.

    Raises:
      UserError: if the source has no local files, or the folder cannot be written.
    """
    if not has_local_files(source):
        raise UserError(
            f'dataset.cache is disk, but {source.name_of(0)} is not a file on this machine: '
            'expected a directory of image files as dataset.name, or dataset.cache=none.',
            kind='inapplicable',
            field='dataset.cache',
            value='disk',
        )
    cache = os.path.expanduser(folder) if folder else cache_folder('photos')
    folder = os.path.abspath(cache)
    photos = source.fetch(tf.range(source.num_examples, dtype=tf.int64))['path'].numpy()
    paths, broken = _add_files(photos, source.unreadable, folder, short_side, share, check)
    return CachedSource(source, photos, paths, broken, folder, short_side)


def _add_files(photos, unreadable, folder, short_side, share, check):
    """Writes the missing files of pixels.

    Returns the path to read for each photo, and the reason for each broken photo, by index.
    """
    number = len(photos)
    paths = photos.copy()
    broken = {}
    todo = np.roll(np.arange(number), -(number * share[0] // share[1]))
    todo = todo[~np.isin(todo, list(unreadable))]  # it may be a pipe, which could block
    _pixels.get_concrete_function()  # now, because TensorFlow warns if several threads trace it
    last_report = time.monotonic()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for begin in range(0, len(todo), _PART):
                check()
                part = todo[begin : begin + _PART]
                files = pool.map(lambda photo: _file_of(photo, folder, short_side), photos[part])
                for index, (path, problem) in zip(part, files, strict=True):
                    paths[index] = path
                    if problem:
                        broken[int(index)] = problem
                num_done = begin + len(part)
                if num_done == len(todo) or time.monotonic() - last_report >= _SILENCE:
                    last_report = time.monotonic()
                    logger.info(
                        'dataset.cache: %d of %d photos are in %s', num_done, len(todo), folder
                    )
    except OSError as error:
        raise _cannot_be_kept(folder, error) from error
    return paths, broken


def _cannot_be_kept(folder, error):
    return UserError(
        f'dataset.cache: photos cannot be kept in {folder} ({error}). They need 3 '
        'bytes per pixel: free some disk space, lower dataset.cache_size, or set '
        'dataset.cache_dir to another folder.',
        kind='unwritable',
        field='dataset.cache_dir',
        file=folder,
    )


class CachedSource(WrappedSource):
    """A source that reads files of pixels in place of photos.

    Args:
      photos: the path of each photo.
      paths: the path to read for each example: a file of pixels, or the photo itself.
      broken: the reason for each broken photo, by index.
      folder: the folder of the files of pixels.
      short_side: the argument of `cached`.
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
        self._restored: set[int] = set()  # indices of files that were rebuilt
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
        purpose = f'which dataset.cache=disk keeps for the pixels of {photo}'
        if path == photo or _is_intact(path):
            return False
        if index in self._restored:
            raise UserError(
                f'{path}, {purpose}, is damaged again after it was rebuilt: check the disk, or '
                'set dataset.cache_dir to another folder.',
                kind='content',
                field='dataset.cache_dir',
                file=path,
            )
        self._restored.add(index)
        try:
            rebuilt_path, problem = _file_of(
                self._photos[index], self._folder, self._short_side, overwrite=True
            )
        except OSError as error:
            raise _cannot_be_kept(self._folder, error) from error
        if rebuilt_path != self._paths[index]:
            raise UserError(
                f'{path}, {purpose}, is damaged or missing, and the photo '
                f'{problem or "has changed"} since the run started: restore the photo, or run the '
                'same command again.',
                kind='content',
                file=photo,
            )
        logger.warning(
            '%s was damaged or missing: rebuilt it from %s',
            path,
            self.source.name_of(index),
        )
        return True


def _file_of(photo, folder, short_side, overwrite=False):
    """Returns (path of the file of pixels, ''), after writing the file if it is missing.

    If the photo is broken, returns (path of the photo, reason). `overwrite` replaces an existing
    file.
    """
    try:
        status = os.stat(photo)
    except (FileNotFoundError, PermissionError) as error:
        return photo, f'cannot be read ({error.strerror})'
    inputs = (_VERSION, os.path.abspath(photo), status.st_size, status.st_mtime_ns, short_side)
    key = hashlib.blake2b(repr(inputs).encode(), digest_size=20).hexdigest()
    path = os.path.join(folder, key[:2], f'{key[2:]}.bmp')
    if overwrite or not _is_whole(path):
        try:
            pixels = _pixels(photo, short_side).numpy()
        except STORAGE_ERRORS:
            raise  # the photo may be good, and its own pixels would change the run
        except tf.errors.OpError as error:
            return photo, reason(error)
        _write(path, Image.fromarray(pixels))
    return os.fsencode(path), ''


def _checksum(encoded):
    """The checksum of the bytes that follow the checksum in a file, from 1 to 2**32 - 1.

    TensorFlow promises that this function (FarmHash) never changes.
    """
    content = tf.strings.substr(encoded, _CONTENT_OFFSET, -1)
    return tf.strings.to_hash_bucket_fast(content, 2**32 - 1) + 1


def _checked(encoded):
    """The content of a file, inside the input graph; the operation fails if the file is damaged."""
    stored = tf.strings.substr(encoded, _CHECKSUM_OFFSET, 4) + bytes(4)
    is_intact = _checksum(encoded) == tf.io.decode_raw(stored, tf.int64)[0]
    with tf.control_dependencies([tf.debugging.Assert(is_intact, ['a kept photo is damaged'])]):
        return tf.identity(encoded)


def _is_intact(path):
    """Whether the file exists, is whole and has the right checksum."""
    if not _is_whole(path):
        return False
    with open(path, 'rb') as file:
        content = file.read()
    stored = _HEADER.unpack(content[: _HEADER.size])[2]
    return int(_checksum(tf.constant(content))) == stored


def _is_whole(path):
    """Whether the file exists, has a valid header, and has the size that the header implies."""
    with contextlib.suppress(FileNotFoundError, struct.error), open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        header = _HEADER.unpack(file.read(_HEADER.size))
        checksum = header[2]
        width, height = header[5:7]
        pixels = -(-3 * width // 4) * 4 * height  # rows are padded to multiples of four bytes
        expected = (b'BM', size, checksum, size - pixels, 40, width, height, 1, 24, 0, pixels)
        return checksum != 0 and header == expected
    return False


def _write(path, image):
    """Writes a file. Other processes see the whole file or none, even if this process is killed."""
    content = io.BytesIO()
    image.save(content, 'BMP')  # in a file, Pillow would not notice a disk that is almost full
    encoded = bytearray(content.getvalue())
    checksum = int(_checksum(tf.constant(bytes(encoded))))
    struct.pack_into('<I', encoded, _CHECKSUM_OFFSET, checksum)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with written_whole(path, is_shared=True) as temporary, open(temporary, 'wb') as file:
        file.write(encoded)


# A graph, so that its Python functions receive the same bytes as in training.
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
