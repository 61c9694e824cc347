"""Examines every photo before training: number, size, format, damage."""

import collections
import concurrent.futures
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.data import images
from vit_jax.errors import counted, some
from vit_jax.files import read_bytes
from vit_jax.fitting import duplicates

log = logging.getLogger(__name__)

_AT_ONCE = 8  # files: decoding releases Python's lock, and disks answer several at once
_REPORT_EVERY = 10.0  # seconds between two lines of progress
UNEQUAL = 3.0  # the largest class compared with the smallest one


class Photo(NamedTuple):
    """The content of one file.

    Attributes:
      file: its path.
      checksum: of its bytes; '' if the file cannot be read.
      width, height: in pixels, upright; 0 if the image cannot be decoded.
      problem: why it cannot be used; '' for a good photo.
    """

    file: str
    checksum: str
    width: int
    height: int
    problem: str


def look_at(file: str) -> Photo:
    """Read and decode one file as training and prediction do."""
    try:
        encoded = read_bytes(file)
    except OSError as error:
        return Photo(file, '', 0, 0, error.strerror or str(error))
    checksum = hashlib.sha256(encoded).hexdigest()
    try:
        height, width, _ = images.decode(encoded).shape
    except ValueError as error:
        return Photo(file, checksum, 0, 0, str(error))
    return Photo(file, checksum, width, height, '')


def scan(files: Sequence[str]) -> list[Photo]:
    """Look at every file, in the order of `files`, with several threads."""
    photos: list[Photo] = []
    reported = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        for photo in pool.map(look_at, files):
            photos.append(photo)
            if time.monotonic() - reported >= _REPORT_EVERY:
                reported = time.monotonic()
                log.info('Scanned %d of %d photos', len(photos), len(files))
    return photos


class Summary(NamedTuple):
    """The scan of a data set in numbers.

    Attributes:
      images_per_class: good photos by class name, the largest class first.
      sides: the smallest, median and largest shorter side in pixels.
      formats: good photos by the ending of their names.
      broken: {file: problem}.
      copies: good photos whose file has the bytes of an earlier one.
      left_out: files of other formats by the ending of their names.
    """

    images_per_class: dict[str, int]
    sides: tuple[int, int, int]
    formats: dict[str, int]
    broken: dict[str, str]
    copies: int
    left_out: dict[str, int]

    def imbalance(self) -> float:
        """The size of the largest class divided by the size of the smallest one."""
        counts = list(self.images_per_class.values())
        return max(counts) / max(1, min(counts))

    def is_unequal(self) -> bool:
        """Whether training should show the rare classes more often."""
        return self.imbalance() >= UNEQUAL

    def as_json(self) -> dict[str, Any]:
        """The numbers by name, for a JSON file."""
        return self._asdict() | {'imbalance': self.imbalance()}


def other_formats(folders: Iterable[str]) -> dict[str, int]:
    """Count the visible files in folders that are no images, by the ending of their names."""
    endings: collections.Counter[str] = collections.Counter()
    for folder in folders:
        for name in os.listdir(folder):
            is_visible = not name.startswith('.')
            if is_visible and not images.is_image(name) and os.path.isfile(f'{folder}/{name}'):
                endings[os.path.splitext(name)[1].lower() or name] += 1
    return dict(endings.most_common())


def summarise(
    photos: Sequence[Photo],
    labels: Mapping[str, Sequence[str]],
    left_out: Mapping[str, int] | None = None,
) -> Summary:
    """Count the photos of a scan.

    Args:
      photos: at least one of them is good.
      labels: the class names of each file.
      left_out: files of other formats, from `other_formats`; None: no files.
    """
    good = [photo for photo in photos if not photo.problem]
    of_class: collections.Counter[str] = collections.Counter()
    formats: collections.Counter[str] = collections.Counter()
    for names in labels.values():
        of_class.update(dict.fromkeys(names, 0))
    for photo in good:
        of_class.update(labels[photo.file])
        formats[os.path.splitext(photo.file)[1].lower()] += 1
    sides = sorted(min(photo.width, photo.height) for photo in good)
    return Summary(
        images_per_class=dict(of_class.most_common()),
        sides=(sides[0], sides[len(sides) // 2], sides[-1]),
        formats=dict(formats.most_common()),
        broken={photo.file: photo.problem for photo in photos if photo.problem},
        copies=len(duplicates.equal_pairs([photo.checksum for photo in good])),
        left_out=dict(left_out or {}),
    )


def report(summary: Summary) -> None:
    """Log the results of the scan: a few lines for any number of photos."""
    counts = summary.images_per_class
    total = sum(summary.formats.values())
    log.info(
        'Found %s of %s: %s',
        counted(total, 'photo'),
        counted(len(counts), 'class', 'classes'),
        some([f'{name} {count}' for name, count in counts.items()], 10),
    )
    log.info('The shorter side has %d to %d pixels, in the median %d', *_outer(summary.sides))
    if summary.is_unequal():
        names = list(counts)
        log.warning(
            "Classes are unequal: '%s' has %d photos and '%s' has %d. Training shows the rare "
            'classes more often.',
            names[0],
            counts[names[0]],
            names[-1],
            counts[names[-1]],
        )
    if summary.broken:
        lines = [f'{file}: {problem}' for file, problem in summary.broken.items()]
        log.warning(
            'Left out %s that cannot be read:\n  %s',
            counted(len(lines), 'photo'),
            some(lines, 10, between='\n  '),
        )

    if summary.copies:
        log.warning('Found %s of other photos', counted(summary.copies, 'copy', 'copies'))


def _outer(sides):
    smallest, median, largest = sides
    return smallest, largest, median
