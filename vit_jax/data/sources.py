"""Where examples come from: the built-in digits, files of images, or a TFDS data set."""

import concurrent.futures
import functools
import hashlib
import itertools
import logging
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from vit_jax.data import folders, folds, heic, label_lists, photo_table, stratify
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.images import SUFFIXES, SUFFIXES_WITHOUT_HEIC, is_image
from vit_jax.data.sequential import Pieces
from vit_jax.data.source import Source
from vit_jax.errors import UserError, counted, some

logger = logging.getLogger('vit_jax.data')
# A split is opened several times: for its slices, and by each run of a sweep.
_warn_once = functools.cache(logger.warning)
# Parallel requests for the sizes of files, because file servers answer many at the same time.
_STAT_THREADS = 16
_FILES_PER_STAT_TASK = 500


def open_source(
    name: str,
    split: str,
    data_dir: str = '',
    class_names: Sequence[str] | None = None,
    label: str = '',
    stratify: bool = True,
    with_heic: bool = True,
) -> Source:
    """Opens a split of a data set.

    Args:
      name: 'digits', a table of photos (FILE.csv), a directory or the name of a TFDS set.
      split: for example 'train', 'train[:90%]' or 'train[100:200]'; TFDS sets also accept sums of
        slices, such as 'train[:800]+validation[:200]'. 'train@fold=1/5' and 'train@fold!=1/5' are
        a fold and its rest, see folds.
      data_dir: the directory of the TFDS sets; '' is the default of TFDS.
      class_names: for a directory, the classes in the order of their labels. Pass the classes of
        the training split when opening another split.
      label: the label of a TFDS set, see tfds_labels.image_and_label; '' is the set's own label.
      stratify: for a directory, see DirectorySource.
      with_heic: for a directory, whether HEIC photos are read.

    Raises:
      UserError: if the split does not exist or cannot be used.
    """
    if not name:
        raise UserError(
            'dataset.name is empty: expected a directory with SPLIT/CLASS/image files, or the name '
            'of a TFDS set. Add --config.dataset.name=DIRECTORY_OR_TFDS_NAME.',
            kind='missing',
            field='dataset.name',
        )
    is_digits = name == 'digits'
    is_table = photo_table.is_table(name)
    is_directory = not (is_digits or is_table) and _is_directory(name)
    if label and (is_directory or is_digits or is_table):
        raise UserError(
            f'dataset.label (--label) is {label!r}: only TFDS sets have a choice of labels. Leave '
            f"it empty for '{name}'.",
            kind='inapplicable',
            field='dataset.label',
            value=label,
        )
    source: Source
    if is_digits:
        source = DigitsSource(split)
    elif is_table:
        source = TableSource(os.path.expanduser(name), split, stratify)
    elif is_directory:
        source = DirectorySource(os.path.expanduser(name), split, class_names, stratify, with_heic)
    else:
        from vit_jax.data import tfds_source  # here, because the import is slow

        source = tfds_source.TfdsSource(name, data_dir, split, label)
    if not source.num_examples:
        raise UserError(
            f"the split '{split}' of '{name}' has no examples. Use a larger slice.",
            kind='value',
            value=split,
        )
    return source


def open_split(dataset: Mapping, split: str, class_names: Sequence[str] | None = None) -> Source:
    """Opens a split of `dataset`, the section `config.dataset`; see open_source."""
    return open_source(
        dataset['name'],
        split,
        dataset['data_dir'],
        class_names,
        dataset['label'],
        dataset['stratify'],
        dataset['heic'],
    )


def local_path(name: str) -> str:
    """The absolute path of a directory or a table of photos; '' for other data sets."""
    path = os.path.expanduser(name)
    is_table = photo_table.is_table(name) and os.path.isfile(path)
    if is_table or (name != 'digits' and os.path.isdir(path)):
        return os.path.abspath(path)
    return ''


def _is_directory(name):
    if tf.io.gfile.isdir(os.path.expanduser(name)):
        return True
    first = re.split(r'[/\\]', name)[0]
    if first == name or first in ('', '.', '..', '~') or ':' in first:
        return first != name
    # 'imagenet2012_subset/1pct' is a TFDS configuration, 'images/mine' a missing directory.
    from vit_jax.data import tfds_source

    return not tfds_source.is_registered(first)


def examples_per_class(source: Source) -> Int64[np.ndarray, ' classes'] | None:
    """The number of examples of each class; None if labels are known only when they are read."""
    labels = source.labels
    if source.label_lists is not None:
        labels = np.concatenate([np.zeros(0, np.int32), *source.label_lists]).astype(np.int32)
    if labels is None:
        return None
    return np.bincount(labels, minlength=len(source.class_names))


def classes_without_examples(source: Source) -> list[str]:
    """The names of the empty classes; [] if labels are known only when they are read."""
    counts = examples_per_class(source)
    if counts is None:
        return []
    return [source.class_names[k] for k in np.flatnonzero(counts == 0)]


def class_counts(source: Source, field: str) -> Int64[np.ndarray, ' classes']:
    """The number of examples of each class, which the config field `field` needs.

    Raises:
      UserError: if labels are known only when they are read, or a class has no example.
    """
    if source.labels is None:
        if source.multi_label:
            reason = 'images have several labels'
        else:
            reason = 'TFDS sets have labels only when they are read'
        raise UserError(
            f'{field} needs the label of every training image, but {reason}. Use a directory '
            'SPLIT/CLASS/images, or loss.class_weights=NUMBER,... for each class without '
            'dataset.balance.',
            kind='inapplicable',
            field=field,
        )
    empty_classes = classes_without_examples(source)
    if empty_classes:
        raise UserError(
            f'{field} needs examples of every class, but {len(empty_classes)} of '
            f'{len(source.class_names)} classes have none: {some(empty_classes)}. Use a larger '
            'split, or remove empty folders.',
            kind='missing',
            field=field,
            value=empty_classes,
        )
    counts = examples_per_class(source)
    assert counts is not None  # the labels are known
    return counts


def split_name(split: str) -> str:
    """The split that contains a slice or a fold: 'train' for 'train[:90%]'.

    Raises:
      UserError: if `split` is not the name of a split or a slice.
    """
    return _parse_split(split)[0]


def split_range(split: str, num_examples: int) -> tuple[int, int]:
    """The range (begin, end) of a slice, as in TFDS (percentages round to the nearest).

    The range of a fold is the range of the slice that contains it.
    """
    _, begin, end = _parse_split(split)
    bounds = slice(_bound(begin, num_examples), _bound(end, num_examples))
    first, last, _ = bounds.indices(num_examples)
    return first, max(first, last)


def _bound(text, num_examples):
    """The number of examples for '100', '-100', '10%' or None in a slice."""
    if text is None:
        return None
    if text.endswith('%'):
        return round(int(text[:-1]) * num_examples / 100)
    return int(text)


def shared_split(split: str, other: str, opened: Callable[[str], Source]) -> str | None:
    """The split in which two slices, or sums of slices, share examples; None if they share none.

    Folds of different slices, or of different numbers, count as the slices that contain them.
    `opened` opens a whole split by its name, for its number of examples.
    """
    slices, fold = folds.parse(split)
    other_slices, other_fold = folds.parse(other)
    if slices == other_slices and folds.are_disjoint(fold, other_fold):
        return None
    for part, other_part in itertools.product(slices.split('+'), other_slices.split('+')):
        name = split_name(part)
        if name != split_name(other_part):
            continue
        total = opened(name).num_examples
        first, last = split_range(part, total)
        other_first, other_last = split_range(other_part, total)
        if max(first, other_first) < min(last, other_last):
            return name
    return None


def _parse_split(split):
    """(name, begin, end) of 'name[begin:end]'; begin and end are None where they are missing."""
    part, _ = folds.parse(split)
    match = re.fullmatch(r'([^\[\]+]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?', part)
    if match is None:
        raise UserError(
            f"the split '{split}' cannot be read: expected a form such as 'train', 'train[:90%]' "
            "or 'train[100:200]'.",
            kind='value',
            value=split,
        )
    return match.groups()


class _Table:
    """A source with random access whose items are the rows of a table of tensors."""

    pieces: Pieces | None = None
    multi_label = False
    stratified = False

    def __init__(self, label, **columns):
        """`label` has for each row one label or, for a multi-label source, a list of labels."""
        self.num_examples = len(label)
        self.unreadable = {}
        if self.multi_label:
            self.labels = None
            self.label_lists = label
            label_column = label_lists.pack(label)
        else:
            self.labels = np.asarray(label, np.int32)
            self.label_lists = None
            label_column = tf.constant(label, tf.int32)
        self._columns = {**columns, 'label': label_column}

    def fetch(self, indices):
        return {name: tf.gather(column, indices) for name, column in self._columns.items()}

    def restore(self, index):
        return False


class DigitsSource(_Table):
    """The 1797 handwritten digits that come with scikit-learn, as PNG files in memory.

    Every fifth example is in the split 'test' (360), the others are in 'train' (1437).
    """

    class_names = tuple('0123456789')

    def __init__(self, split):
        from sklearn.datasets import load_digits  # here, because the import is slow

        digits = load_digits()
        is_test = np.arange(len(digits.target)) % 5 == 0
        splits = {'train': ~is_test, 'test': is_test}
        name = split_name(split)
        if name not in splits:
            raise UserError(
                f"'digits' has no split '{name}'; it has 'train' and 'test'.",
                kind='unknown',
                value=name,
            )
        first, last = split_range(split, splits[name].sum())
        rows = np.flatnonzero(splits[name])[first:last]
        _, fold = folds.parse(split)
        if fold is not None:
            fold_of_row = folds.by_class(digits.target[rows], fold.num_folds)
            rows = rows[folds.positions(fold, fold_of_row, split)]
        # Grey levels are 0..16 in scikit-learn and 0..255 in a PNG file.
        grey = np.round(digits.images[rows] * (255 / 16)).astype(np.uint8)
        super().__init__(digits.target[rows], encoded=tf.io.encode_png(grey[..., None]))

    def load(self, item):
        return item['encoded'], item['label']

    def name_of(self, index):
        return f'digit {index}'

    def listing(self):
        yield 'digits', f'{len(self.labels)} digits', zlib.crc32(self.labels.tobytes())


class _FileSource(_Table):
    """Image files; only their paths are in memory.

    The order of the files depends only on the names and labels of all files of the split. The files
    of one class are in a pseudo-random order, which depends on their names only. If every file has
    one label and `stratify` is set, the classes are mixed as in stratify.stratified_order, so that
    slices have every class in proportion. A new file then shifts other files of its class by up to
    one place, so that a few files may move to another slice. Otherwise all files are in the
    pseudo-random order. A new file then changes the order of no other files, but a slice may miss a
    class.
    """

    def __init__(self, folder, images, split, stratify, group_of_name=None):
        """Args:
        folder: of the relative names.
        images: (name, label, kind of folders.entries) of every image of the whole split.
        split: which slice or fold of them this source has.
        stratify: whether slices have every class in proportion.
        group_of_name: the group of each image, which is in one fold; '' is no group.
        """
        images.sort(key=lambda image: (hashlib.blake2b(os.fsencode(image[0])).digest(), image[0]))
        self.stratified = stratify and not self.multi_label
        if self.stratified:
            images = _stratified(images)
        first, last = split_range(split, len(images))
        images = images[first:last]
        _, fold = folds.parse(split)
        if fold is not None:
            fold_of_image = self._folds(images, fold.num_folds, group_of_name or {})
            images = [images[k] for k in folds.positions(fold, fold_of_image, split)]
        _require_decoder_of_heic(folder, [name for name, _, _ in images])
        self._folder = folder
        paths = [os.fsencode(os.path.join(folder, path)) for path, _, _ in images]
        super().__init__([label for _, label, _ in images], path=tf.constant(paths, tf.string))
        # These are never opened: a pipe or a device could block for ever.
        self.unreadable = {
            index: 'it is neither a file nor a link to one'
            for index, (_, _, kind) in enumerate(images)
            if kind == 'other'
        }

    def _folds(self, images, count, group_of_name):
        """The number of the fold of each image, from 1."""
        labels = [label for _, label, _ in images]
        groups = [group_of_name.get(name, '') for name, _, _ in images]
        if not self.multi_label and not any(groups):
            return folds.by_class(np.array(labels), count)
        targets = np.zeros((len(images), len(self.class_names)), bool)
        for row, label in zip(targets, labels, strict=True):
            row[label] = True
        return folds.by_group(targets, groups, count)

    def load(self, item):
        label = item['label']
        if self.multi_label:
            label = label_lists.multi_hot(label_lists.unpack(label), len(self.class_names))
        return tf.io.read_file(item['path']), label

    def name_of(self, index):
        return self._columns['path'][index].numpy().decode(errors='backslashreplace')

    def listing(self):
        paths = self._columns['path'].numpy()
        labels = self._columns['label'].numpy()
        sizes = _file_sizes(paths, self._folder)
        prefix = os.fsencode(os.path.join(self._folder, ''))
        for path, label, size in zip(paths, labels, sizes, strict=True):
            name = path.removeprefix(prefix).decode(errors='backslashreplace')
            if self.multi_label:
                numbers = np.frombuffer(label, np.int32)
                classes = ';'.join(self.class_names[number] for number in numbers)
                yield '', f'{name} ({classes})', int(size)
            else:
                yield self.class_names[label], name, int(size)


class DirectorySource(_FileSource):
    """Image files in DIR/SPLIT/CLASS/ or DIR/CLASS/.

    Labels are positions in `class_names`, by default all class folders of the split in sorted
    order, including empty folders. Without class folders, DIR/SPLIT/labels.csv has the labels, see
    label_lists. Without `with_heic`, the source leaves HEIC photos out as files of an unknown kind.
    """

    def __init__(self, root, split, class_names=None, stratify=True, with_heic=True):
        suffixes = SUFFIXES if with_heic else SUFFIXES_WITHOUT_HEIC
        folder = folders.split_folder(root, split_name(split))
        if label_lists.has_table(folder):
            table = label_lists.images(root, folder, class_names, suffixes)
            self.class_names, images, self.multi_label = table
        else:
            self.class_names, images = _images_of_classes(folder, class_names, suffixes)
            self.multi_label = False
        if not images:
            raise UserError(
                f"no image in the {len(self.class_names)} class folder(s) of '{folder}': "
                f'expected files SPLIT/CLASS/NAME with one of the endings {", ".join(suffixes)}.',
                kind='missing',
                file=folder,
            )
        super().__init__(folder, images, split, stratify)


class TableSource(_FileSource):
    """The images that one split of a table of photos names, see photo_table.

    Labels are positions in the sorted names of all classes of the table, in whatever split. Images
    of one group are in one fold. Slices such as train[:90%] may divide a group.
    """

    def __init__(self, path, split, stratify=True):
        table = photo_table.read(path)
        name = split_name(split)
        rows = [row for row in table.rows if row.split in ('', name)]
        splits = table.splits()
        if name not in (splits or ('train',)):
            raise UserError(
                f"'{path}' has no split '{name}': expected {some(splits or ['train'])}.",
                kind='unknown',
                file=path,
                value=name,
            )
        self.class_names = table.class_names()
        self.multi_label = table.multi_label
        folder = os.path.dirname(os.path.abspath(path))
        numbers = {label: number for number, label in enumerate(self.class_names)}
        images = []
        group_of_file = {}
        for row in rows:
            labels = [numbers[label] for label in row.labels]
            inside = os.path.commonpath([folder, row.file]) == folder
            file = os.path.relpath(row.file, folder) if inside else row.file
            images.append((file, labels if self.multi_label else labels[0], 'file'))
            group_of_file[file] = row.group
        super().__init__(folder, images, split, stratify, group_of_file)


def _require_decoder_of_heic(folder, names):
    """Raises UserError if there are HEIC photos but no decoder.

    They would count as broken, but they are good. A run that skips them would not be the same run
    after an installation.
    """
    photos = [name for name in names if heic.has_suffix(name)]
    if not photos or heic.is_installed():
        return
    raise UserError(
        f"{counted(len(photos), 'photo')} in '{folder}' need the package pillow-heif, for example "
        f'{photos[0]!r}. {heic.HOW_TO_INSTALL}\nOr move them away. A run on a directory can also '
        'leave them out: --config.dataset.heic=False.',
        kind='missing',
        field='dataset.heic',
        file=os.path.join(folder, photos[0]),
        value=len(photos),
    )


def _file_sizes(paths, folder):
    """The size of each file in bytes; -1 for missing files, and 0 for all files on remote storage.

    Asking remote storage for the size of each file would take hours.
    """
    if '://' in folder:
        return np.zeros(len(paths), np.int64)
    parts = [
        paths[start : start + _FILES_PER_STAT_TASK]
        for start in range(0, len(paths), _FILES_PER_STAT_TASK)
    ]
    sizes = []
    last_report = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_STAT_THREADS) as pool:
        for part in pool.map(_sizes_of_part, parts):
            sizes += part
            if time.monotonic() - last_report >= folders.SILENCE:
                last_report = time.monotonic()
                logger.info(
                    "Read the sizes of %d of %d files in '%s'", len(sizes), len(paths), folder
                )
    return np.array(sizes, np.int64)


def _sizes_of_part(paths):
    return [_file_size(path) for path in paths]


def _file_size(path):
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _stratified(images):
    labels = np.array([label for _, label, _ in images])
    return [images[index] for index in stratify.stratified_order(labels)]


def _images_of_classes(folder, class_names, suffixes):
    """The classes, and (path, label, kind as in folders.entries) of every image in the folders."""
    contents, class_of_folder = folders.class_contents(folder, class_names)
    if class_names is None:
        class_names = contents
    class_names = tuple(class_names)
    _warn_of_skipped_entries(folder, contents, suffixes)
    labels = {name: label for label, name in enumerate(class_names)}
    images = []
    for name, kinds in contents.items():
        label = labels[class_of_folder[name]]
        images += [
            (f'{name}/{file}', label, kind)
            for file, kind in kinds.items()
            if _is_image_file(file, kind, suffixes)
        ]
    return class_names, images


def _is_image_file(name, kind, suffixes):
    return kind != 'folder' and is_image(name, suffixes)


def _warn_of_skipped_entries(folder, contents, suffixes):
    """Warns of files in class folders that are not images, and of class folders without images."""
    skipped = Counter()
    without_images = []
    for class_folder, kinds in contents.items():
        skipped_here = [
            (name, kind) for name, kind in kinds.items() if not _is_image_file(name, kind, suffixes)
        ]
        skipped.update(_ending(name, kind) for name, kind in skipped_here)
        if kinds and len(skipped_here) == len(kinds):
            without_images.append(class_folder)
    if not skipped:
        return
    text = ', '.join(f'{count} {ending}' for ending, count in skipped.most_common())
    if without_images:
        text += f'. Class folder(s) without any image: {", ".join(without_images)}'
    _warn_once(f"'{folder}': only files {', '.join(suffixes)} are read; skipped: {text}")


def _ending(name, kind):
    if kind == 'folder':
        return 'folder'
    return os.path.splitext(name)[1] or 'without ending'
