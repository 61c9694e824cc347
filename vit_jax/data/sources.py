"""Where examples come from: the built-in digits, a directory of images, or a TFDS data set."""

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

from vit_jax.data import folders, label_lists, stratify
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.images import SUFFIXES, is_image
from vit_jax.data.sequential import Pieces
from vit_jax.data.source import Source
from vit_jax.errors import UserError, some

logger = logging.getLogger('vit_jax.data')
# A split is opened several times: for slices of it, and by each run of a sweep.
_warn_once = functools.cache(logger.warning)
# Requests for the sizes of files: file servers answer many at the same time.
_STATS_AT_ONCE = 16
_STATS_IN_A_PART = 500


def open_source(
    name: str,
    split: str,
    data_dir: str = '',
    class_names: Sequence[str] | None = None,
    label: str = '',
    stratify: bool = True,
) -> Source:
    """Opens a split of a data set; UserError if it does not exist or cannot be used.

    Args:
      name: 'digits', a directory or a TFDS name.
      split: 'train', 'train[:90%]', 'train[100:200]' ...; of a TFDS set also sums of these, as in
        'train[:800]+validation[:200]'.
      data_dir: where TFDS sets are; '' is TFDS's own default.
      class_names: for a directory, the classes in the order of their labels; give those of the
        training split when opening another one.
      label: of a TFDS set, see tfds_labels.image_and_label; '' is its own.
      stratify: of a directory, see DirectorySource.
    """
    if not name:
        raise UserError(
            'dataset.name is empty: add --config.dataset.name=DIRECTORY_OR_TFDS_NAME, where the '
            'directory has SPLIT/CLASS/image files'
        )
    is_directory = name != 'digits' and _is_directory(name)
    if label and (is_directory or name == 'digits'):
        raise UserError(
            f'dataset.label (--label) is {label!r}, and only TFDS sets have several to '
            f"choose from: leave it empty for '{name}'."
        )
    source: Source
    if name == 'digits':
        source = DigitsSource(split)
    elif is_directory:
        source = DirectorySource(os.path.expanduser(name), split, class_names, stratify)
    else:
        from vit_jax.data import tfds_source  # here, because the import is slow

        source = tfds_source.TfdsSource(name, data_dir, split, label)
    if not source.num_examples:
        raise UserError(f"split '{split}' of '{name}' has no examples; take a larger slice")
    return source


def open_split(dataset: Mapping, split: str, class_names: Sequence[str] | None = None) -> Source:
    """A split of what `dataset`, that section of a config, names; the rest is as in open_source."""
    return open_source(
        dataset['name'],
        split,
        dataset['data_dir'],
        class_names,
        dataset['label'],
        dataset['stratify'],
    )


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
    """The names of the classes that have none; [] if labels are known only when they are read."""
    counts = examples_per_class(source)
    if counts is None:
        return []
    return [source.class_names[k] for k in np.flatnonzero(counts == 0)]


def class_counts(source: Source, field: str) -> Int64[np.ndarray, ' classes']:
    """The number of examples of each class, which `field` needs.

    Raises UserError where labels are not known before they are read, or a class has no example.
    """
    if source.labels is None:
        reason = (
            'images have several labels'
            if source.multi_label
            else 'those of TFDS sets are known when they are read'
        )
        raise UserError(
            f'{field} needs the label of every training image, and {reason}. Take a '
            'directory SPLIT/CLASS/images, or loss.class_weights=NUMBER,... for each '
            'class, without dataset.balance.'
        )
    if empty := classes_without_examples(source):
        raise UserError(
            f'{field} needs examples of every class, and {len(empty)} of '
            f'{len(source.class_names)} have none: {some(empty)}. Take a larger split, or remove '
            'empty folders.'
        )
    counts = examples_per_class(source)
    assert counts is not None  # the labels are known
    return counts


def split_name(split: str) -> str:
    """The split of which 'train[:90%]' is a slice; UserError if it is not written like that."""
    return _parse_split(split)[0]


def split_range(split: str, num_examples: int) -> tuple[int, int]:
    """First and last + 1 example of a slice, as in TFDS (percentages round to the nearest)."""

    def number(text):
        if text and text.endswith('%'):
            return round(int(text[:-1]) * num_examples / 100)
        return text and int(text)

    first, last, _ = slice(*map(number, _parse_split(split)[1:])).indices(num_examples)
    return first, max(first, last)


def shared_split(split: str, other: str, opened: Callable[[str], Source]) -> str | None:
    """The split of which both, slices or sums of slices, have some of the same examples.

    None if there is none. `opened` opens a whole split by its name, to see how many it has.
    """
    for parts in itertools.product(split.split('+'), other.split('+')):
        name, other_name = map(split_name, parts)
        if name == other_name:
            total = opened(name).num_examples
            (first, last), (begin, end) = (split_range(part, total) for part in parts)
            if max(first, begin) < min(last, end):
                return name
    return None


def _parse_split(split):
    if not (match := re.fullmatch(r'([^\[\]+]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?', split)):
        raise UserError(
            f"split '{split}' cannot be read; write 'train', 'train[:90%]' or 'train[100:200]'"
        )
    return match.groups()


class _Table:
    """A source with random access whose items are the rows of a table of tensors.

    `label` is one label or a list of them for each.
    """

    pieces: Pieces | None = None
    multi_label = False
    stratified = False

    def __init__(self, label, **columns):
        self.num_examples, self.unreadable = len(label), {}
        self.labels = None if self.multi_label else np.asarray(label, np.int32)
        self.label_lists = label if self.multi_label else None
        label = label_lists.pack(label) if self.multi_label else tf.constant(label, tf.int32)
        self._columns = {**columns, 'label': label}

    def fetch(self, indices):
        return {name: tf.gather(column, indices) for name, column in self._columns.items()}

    def restore(self, index):
        return False


class DigitsSource(_Table):
    """The 1797 handwritten digits that come with scikit-learn, as PNG files in memory.

    Every fifth example is split 'test' (360), the rest 'train' (1437).
    """

    class_names = tuple('0123456789')

    def __init__(self, split):
        from sklearn.datasets import load_digits  # here, because the import is slow

        digits = load_digits()
        held_out = np.arange(len(digits.target)) % 5 == 0
        splits = {'train': ~held_out, 'test': held_out}
        name = split_name(split)
        if name not in splits:
            raise UserError(f"'digits' has no split '{name}'; it has 'train' and 'test'")
        chosen = np.flatnonzero(splits[name])[slice(*split_range(split, splits[name].sum()))]
        # The grey levels are 0..16; those of a byte are 0..255.
        grey = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)
        super().__init__(digits.target[chosen], encoded=tf.io.encode_png(grey[..., None]))

    def load(self, item):
        return item['encoded'], item['label']

    def name_of(self, index):
        return f'digit {index}'

    def listing(self):
        yield 'digits', f'{len(self.labels)} digits', zlib.crc32(self.labels.tobytes())


class DirectorySource(_Table):
    """Image files in DIR/SPLIT/CLASS/, or DIR/CLASS/; only their paths are held in memory.

    Labels are positions in `class_names`, by default all class folders of the split in sorted
    order, including empty ones. Without class folders DIR/SPLIT/labels.csv has the labels, see
    label_lists.

    The order of the files depends on the names and labels of all files of the split. Files of one
    class are in a pseudo-random order that depends on their names only. Where every file has one
    label and `stratify` is set, the classes are mixed as in stratify.stratified_order, so that
    slices have every class in proportion: a new file moves others of its class by up to one place
    among these, and so a few files across a cut. Otherwise all files are in the pseudo-random
    order, in which a new file moves no other, and a slice may lack a class.
    """

    def __init__(self, root, split, class_names=None, stratify=True):
        folder = folders.split_folder(root, split_name(split))
        self.class_names, images, self.multi_label = (
            label_lists.images(root, folder, class_names)
            if label_lists.has_table(folder)
            else (*_images_of_classes(folder, class_names), False)
        )
        if not images:
            raise UserError(
                f"no image in the {len(self.class_names)} class folder(s) of '{folder}'; expected "
                f'files SPLIT/CLASS/NAME with one of the endings {", ".join(SUFFIXES)}'
            )
        images.sort(key=lambda image: (hashlib.blake2b(os.fsencode(image[0])).digest(), image[0]))
        self.stratified = stratify and not self.multi_label
        if self.stratified:
            images = _stratified(images)
        images = images[slice(*split_range(split, len(images)))]
        self._folder = folder
        paths = [os.fsencode(os.path.join(folder, path)) for path, *_ in images]
        super().__init__([label for _, label, _ in images], path=tf.constant(paths, tf.string))
        # Not to be opened: a pipe or a device could block for ever.
        self.unreadable = {
            index: 'it is neither a file nor a link to one'
            for index, (*_, kind) in enumerate(images)
            if kind == 'other'
        }

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
        sizes = _sizes(paths, self._folder)
        before_name = len(os.fsencode(os.path.join(self._folder, '')))
        for k in range(len(paths)):
            name = paths[k][before_name:].decode(errors='backslashreplace')
            if self.multi_label:
                numbers = np.frombuffer(labels[k], np.int32)
                label = ';'.join(self.class_names[number] for number in numbers)
                yield '', f'{name} ({label})', int(sizes[k])
            else:
                yield self.class_names[labels[k]], name, int(sizes[k])


def _sizes(paths, folder):
    """The size of each file in bytes; -1 for one that cannot be found, 0 on remote storage.

    There a request for each file would take hours.
    """
    if '://' in folder:
        return np.zeros(len(paths), np.int64)
    parts = [paths[k : k + _STATS_IN_A_PART] for k in range(0, len(paths), _STATS_IN_A_PART)]
    sizes = []
    said = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(_STATS_AT_ONCE) as pool:
        for part in pool.map(_sizes_of_part, parts):
            sizes += part
            if time.monotonic() - said >= folders.SILENCE:
                said = time.monotonic()
                logger.info("sizes of files in '%s': %d of %d", folder, len(sizes), len(paths))
    return np.array(sizes, np.int64)


def _sizes_of_part(paths):
    return [_size(path) for path in paths]


def _size(path):
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _stratified(images):
    labels = np.array([label for _, label, _ in images])
    return [images[index] for index in stratify.stratified_order(labels)]


def _images_of_classes(folder, class_names):
    """The classes, and (path, label, kind of folders.entries) of every image in their folders."""
    contents, class_of_folder = folders.class_contents(folder, class_names)
    class_names = tuple(contents if class_names is None else class_names)
    _warn_of_others(folder, contents)
    labels = {name: label for label, name in enumerate(class_names)}
    return class_names, [
        (f'{name}/{file}', labels[class_of_folder[name]], kind)
        for name, kinds in contents.items()
        for file, kind in kinds.items()
        if kind != 'folder' and is_image(file)
    ]


def _warn_of_others(folder, contents):
    """Says what is left out of the class folders."""
    others = Counter(
        'folder' if kind == 'folder' else os.path.splitext(name)[1] or 'without ending'
        for kinds in contents.values()
        for name, kind in kinds.items()
        if kind == 'folder' or not is_image(name)
    )
    if not others:
        return
    text = ', '.join(f'{count} {ending}' for ending, count in others.most_common())
    if empty := [
        name
        for name, kinds in contents.items()
        if kinds and not any(kind != 'folder' and is_image(file) for file, kind in kinds.items())
    ]:
        text += f'. Class folder(s) without any image: {", ".join(empty)}'
    _warn_once(f"'{folder}': only files {', '.join(SUFFIXES)} are read; left out: {text}")
