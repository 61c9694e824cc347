"""The photos that `fit` is given, whatever they come as, with their labels and splits."""

import hashlib
import json
import logging
import os
from typing import NamedTuple

import numpy as np

from vit_jax.data import folders, photo_table, sources
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.photo_table import Row
from vit_jax.data.source import Source, has_local_files
from vit_jax.errors import MissingDataError, UserError, counted
from vit_jax.files import writing

log = logging.getLogger(__name__)

TRAIN, VALIDATION, TEST = 'train', 'val', 'test'
SPLITS = (TRAIN, VALIDATION, TEST)
# Other names of splits, as folders and tables have them.
_OTHER_NAMES = {
    'training': TRAIN,
    'valid': VALIDATION,
    'validation': VALIDATION,
    'eval': VALIDATION,
    'evaluation': VALIDATION,
    'dev': VALIDATION,
    'testing': TEST,
}
_MOST_SAVED = 200_000  # images of a set without files


class Collection(NamedTuple):
    """All photos.

    Attributes:
      rows: each with a split of SPLITS, or '' for a photo that may go into any.
      multi_label: whether a photo may have several labels.
      class_names: sorted, as those of a table of photos.
    """

    rows: list[Row]
    multi_label: bool
    class_names: tuple[str, ...]

    def splits(self) -> list[str]:
        """The splits that have photos, in the order of SPLITS."""
        present = {row.split for row in self.rows}
        return [split for split in SPLITS if split in present]

    def checksum(self) -> str:
        """A text that changes with the files, their labels, splits and groups."""
        rows = sorted(map(list, self.rows))
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def collect(name: str, folder: str) -> Collection:
    """Find the photos of a table, a directory, or any other data set.

    Args:
      name: a table of photos (FILE.csv), a directory of CLASS/photo or SPLIT/CLASS/photo files,
        'digits', or the name of a TFDS data set.
      folder: where the images of a data set without files are written.

    Raises:
      UserError: if there are no photos, fewer than two classes, or something cannot be read.
    """
    is_table = photo_table.is_table(name)
    found = _of_table(name) if is_table else _of_source(name, folder)
    if len(found.class_names) < 2 and not found.multi_label:
        raise UserError(
            f'{name} has one class, {found.class_names[0]!r}: expected two or more. A classifier '
            'tells classes apart: add a folder with photos of something else.',
            kind='content',
            file=name,
            value=list(found.class_names),
        )
    return found


def _of_table(path):
    table = photo_table.read(path)
    rows = [row._replace(split=_canonical(row.split, path)) for row in table.rows]
    return Collection(rows, table.multi_label, table.class_names())


def _canonical(split, path):
    """The name of a split in SPLITS; '' stays."""
    name = split.lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in ('', *SPLITS):
        raise UserError(
            f'{path} has the split {split!r}: expected {", ".join(SPLITS)}, or no split.',
            kind='choice',
            file=path,
            value=split,
        )
    return name


def _of_source(name, folder):
    rows: list[Row] = []
    class_names = None
    multi_label = False
    for split in _splits_of(name):
        source = sources.open_source(name, split, class_names=class_names)
        class_names = source.class_names
        multi_label = source.multi_label
        rows += _rows_of(source, _canonical(split, name), folder)
    assert class_names is not None  # there is at least one split
    if _is_flat(name):
        rows = [row._replace(split='') for row in rows]
    labelled = [row for row in rows if row.labels]
    if len(labelled) < len(rows):
        log.warning('Left out %s without a label', counted(len(rows) - len(labelled), 'image'))
    names = {name.strip() for name in class_names}
    return Collection(labelled, multi_label, tuple(sorted(names)))


def _splits_of(name):
    """The splits that a data set has."""
    if name == 'digits':
        return ['train', 'test']
    root = os.path.expanduser(name)
    if os.path.isdir(root):
        known = {TRAIN, VALIDATION, TEST, *_OTHER_NAMES}
        found = [folder for folder in folders.subfolders(root) if folder.lower() in known]
        return found or ['train']
    from vit_jax.data import tfds_source  # imports TFDS

    try:
        return tfds_source.split_names(name)
    except MissingDataError as error:
        if tfds_source.is_registered(name):
            raise
        what = 'is no folder' if os.path.exists(root) else f'is not in {os.getcwd()}'
        raise UserError(
            f"{name!r} {what}: expected a folder of photos, a table FILE.csv, 'digits', or the "
            'name of a TFDS data set.',
            kind='missing',
            file=name,
        ) from error


def _is_flat(name):
    """Whether a directory has class folders and no folders of splits."""
    root = os.path.expanduser(name)
    return (
        os.path.isdir(root)
        and _splits_of(name) == ['train']
        and not os.path.isdir(os.path.join(root, 'train'))
    )


def _rows_of(source: Source, split: str, folder: str) -> list[Row]:
    if has_local_files(source):
        paths = source.fetch(tf.range(source.num_examples, dtype=tf.int64))['path']
        files = [os.path.abspath(os.fsdecode(path)) for path in paths.numpy()]
        labels = _labels_of(source)
    else:
        files, labels = _saved(source, os.path.join(folder, split))
    names = [name.strip() for name in source.class_names]  # tables have no spaces around a name
    return [
        Row(file, tuple(names[k] for k in of_image), split)
        for file, of_image in zip(files, labels, strict=True)
    ]


def _labels_of(source: Source) -> list[list[int]]:
    """The numbers of the classes of each image, of a source that knows them."""
    if source.label_lists is not None:
        return [list(labels) for labels in source.label_lists]
    assert source.labels is not None  # sources of local files know their labels
    return [[label] for label in source.labels.tolist()]


def _saved(source: Source, folder: str) -> tuple[list[str], list[list[int]]]:
    """Write the images of a source that has no files.

    Returns:
      Their paths, and the numbers of the classes of each.
    """
    if source.pieces is not None or source.num_examples > _MOST_SAVED:
        raise UserError(
            f'This data set has {source.num_examples} images in large files. Write them to '
            'folders DIR/SPLIT/CLASS, and name DIR.',
            kind='inapplicable',
        )
    os.makedirs(folder, exist_ok=True)
    items = source.fetch(tf.range(source.num_examples, dtype=tf.int64))
    paths = []
    labels = []
    for index in range(source.num_examples):
        encoded, label = source.load({name: column[index] for name, column in items.items()})
        data = encoded.numpy()
        ending = '.jpg' if data[:2] == b'\xff\xd8' else '.png'
        path = os.path.join(folder, f'{index:06d}{ending}')
        if not os.path.isfile(path):
            with writing(path) as temporary, open(temporary, 'wb') as file:
                file.write(data)
        paths.append(os.path.abspath(path))
        labels.append(_numbers_of(np.asarray(label)))
    log.info('Wrote %s to %s', counted(len(paths), 'image'), folder)
    return paths, labels


def _numbers_of(label):
    """The classes of a label, which is a number or multi-hot; [] for an image without one."""
    if label.ndim:
        return np.flatnonzero(label).tolist()
    return [int(label)] if label >= 0 else []
