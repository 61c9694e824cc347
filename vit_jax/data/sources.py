"""Where examples come from: the built-in digits, a directory of images, or a TFDS data set.

Every source has `num_examples`, `class_names`, `name_of(index)` for messages, and
`load(item) -> (encoded string scalar, int label)`, which runs inside the input graph for one item.
A source with random access makes items with `fetch(indices)`: int64 [k] -> dict of tensors [k].
A sequential source instead has `pieces`, runs of records in its files, and its items are
{'record': serialised example}.
"""

import collections
import functools
import hashlib
import logging
import os
import re

import numpy as np

from vit_jax.data.host_tensorflow import tf
from vit_jax.errors import UserError

logger = logging.getLogger('vit_jax.data')

SUFFIXES = ('.jpg', '.jpeg', '.png', '.gif', '.bmp')


def open_source(dataset, split, class_names=None):
    """Opens `split` ('train', 'train[:90%]', ...) of the data set that config.dataset describes.

    dataset: has `name` ('digits', a directory or a TFDS name) and `data_dir` (TFDS; '' = default).
    class_names: for a directory, the classes whose place in this tuple is the label; give those of
    the train split when opening another one.
    Raises UserError if the data or the split is not there or not usable.
    """
    if not dataset.name:
        raise UserError(
            'dataset.name is empty: add --config.dataset.name=DIRECTORY_OR_TFDS_NAME, where the '
            'directory holds SPLIT/CLASS/image files'
        )
    if dataset.name == 'digits':
        source = DigitsSource(split)
    elif _is_directory(dataset.name):
        source = DirectorySource(os.path.expanduser(dataset.name), split, class_names)
    else:
        from vit_jax.data import tfds_source  # here, because the import is slow

        source = tfds_source.open_tfds(dataset.name, dataset.data_dir, split)
    if not source.num_examples:
        raise UserError(f"split '{split}' of '{dataset.name}' has no examples; take a larger slice")
    return source


def _is_directory(name):
    if tf.io.gfile.isdir(os.path.expanduser(name)):
        return True
    first = re.split(r'[/\\]', name)[0]
    if first == name or first in ('', '.', '..', '~') or ':' in first:
        return first != name
    # 'imagenet2012_subset/1pct' is a TFDS configuration, 'images/mine' a directory not there.
    from vit_jax.data import tfds_source

    return not tfds_source.is_registered(first)


def split_name(split):
    """The split that 'train[:90%]' is a slice of; UserError if it is not written like that."""
    return _parse_split(split)[0]


def split_range(split, num_examples):
    """First and last + 1 example of a slice, as TFDS counts them (percent round to nearest)."""
    _, start, stop = _parse_split(split)

    def boundary(text, default):
        if not text:
            return default
        percent = text.endswith('%')
        value = round(int(text[:-1]) * num_examples / 100) if percent else int(text)
        return min(max(value if value >= 0 else num_examples + value, 0), num_examples)

    first = boundary(start, 0)
    return first, max(first, boundary(stop, num_examples))


def _parse_split(split):
    match = re.fullmatch(r'([^\[\]+]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?', split)
    if not match:
        raise UserError(
            f"split '{split}' is not understood; write 'train', 'train[:90%]' or 'train[100:200]'"
        )
    return match.groups()


class DigitsSource:
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
        first, last = split_range(split, splits[name].sum())
        chosen = np.flatnonzero(splits[name])[first:last]
        # 17 grey levels 0..16 over the full range of a byte.
        grey = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)
        self.num_examples = len(chosen)
        self._encoded = tf.constant(
            [tf.io.encode_png(image[..., None]).numpy() for image in grey], tf.string
        )
        self._labels = tf.constant(digits.target[chosen], tf.int32)

    def fetch(self, indices):
        """Items of the examples: int64 [k] -> dict of [k]."""
        return {
            'encoded': tf.gather(self._encoded, indices),
            'label': tf.gather(self._labels, indices),
        }

    def load(self, item):
        """Encoded image and label of one item."""
        return item['encoded'], item['label']

    def name_of(self, index):
        """How messages call an example."""
        return f'digit {index}'


class DirectorySource:
    """Image files in DIR/SPLIT/CLASS/; nothing but their paths is held in memory.

    Labels are places in `class_names`, by default the class folders of the split in sorted order,
    also the empty ones. Files stand in a pseudo-random order that depends on their names only, so
    that every slice has all classes and a new file moves no other.
    """

    def __init__(self, root, split, class_names=None):
        folder = _split_folder(root, split_name(split))
        found, stray = _list_split(folder)
        if stray:
            raise UserError(
                f"'{folder}' holds {len(stray)} image(s) outside of class folders, for example "
                f"'{stray[0]}'; move each to {folder}/CLASS/"
            )
        self.class_names = tuple(found) if class_names is None else tuple(class_names)
        _check_classes(folder, tuple(found), self.class_names)
        files, other = [], {}
        for name in found:
            label = self.class_names.index(name)
            names = sorted(tf.io.gfile.listdir(os.path.join(folder, name)))
            files += [(f'{name}/{file}', label) for file in names if _is_image(file)]
            other[name] = [file for file in names if not _is_image(file) and file[0] != '.']
        _warn_of_others(folder, other, {path.split('/')[0] for path, _ in files})
        if not files:
            raise UserError(
                f"no image in the {len(found)} class folder(s) of '{folder}'; expected files "
                f'SPLIT/CLASS/NAME with one of the endings {", ".join(SUFFIXES)}'
            )
        files.sort(key=lambda file: (hashlib.blake2b(file[0].encode()).digest(), file[0]))
        first, last = split_range(split, len(files))
        self.num_examples = last - first
        self._paths = tf.constant(
            [os.path.join(folder, path) for path, _ in files[first:last]], tf.string, [last - first]
        )
        self._labels = tf.constant([label for _, label in files[first:last]], tf.int32)

    def fetch(self, indices):
        """Items of the examples: int64 [k] -> dict of [k]."""
        return {
            'path': tf.gather(self._paths, indices),
            'label': tf.gather(self._labels, indices),
        }

    def load(self, item):
        """Encoded image and label of one item."""
        return tf.io.read_file(item['path']), item['label']

    def name_of(self, index):
        """How messages call an example."""
        return self._paths[index].numpy().decode()


def _split_folder(root, name):
    gfile = tf.io.gfile
    if not gfile.isdir(root):
        raise UserError(
            f"no directory '{root}'; dataset.name is a directory with SPLIT/CLASS/image files, a "
            "TFDS name or 'digits'"
        )
    folder = os.path.join(root, name)
    if not gfile.isdir(folder):
        there = [entry for entry in _visible(root) if gfile.isdir(os.path.join(root, entry))]
        raise UserError(
            f"no split folder '{name}' in '{root}'; the folders there are: "
            f'{", ".join(there) or "none"}. Name one of them, or a slice such as '
            'train[:90%]: in dataset.train_split, dataset.eval_split and dataset.test_split of a '
            'config, or in --split of vit_jax.evaluate'
        )
    return folder


def _warn_of_others(folder, other, with_images):
    """Says what is left out of class folders: other = {class: names of files}."""
    endings = collections.Counter(
        os.path.splitext(file)[1] or 'without ending' for files in other.values() for file in files
    )
    if not endings:
        return
    text = ', '.join(f'{count} {ending}' for ending, count in endings.most_common())
    empty = [name for name, files in other.items() if files and name not in with_images]
    if empty:
        text += f'; and so class folder(s) without any image: {", ".join(empty)}'
    _warn_once(f"'{folder}': only files {', '.join(SUFFIXES)} are read; left out: {text}")


@functools.cache
def _warn_once(text):
    # A split is opened several times: for slices of it, and by each run of a sweep.
    logger.warning(text)


def _visible(folder):
    # Remote file systems end the names of folders with a slash. Hidden entries are no data.
    names = sorted(entry.rstrip('/') for entry in tf.io.gfile.listdir(folder))
    return [name for name in names if not name.startswith('.')]


def _is_image(name):
    return name.lower().endswith(SUFFIXES) and not name.startswith('.')


def _list_split(folder):
    """Class folders, and images that stand beside them, each sorted."""
    names = _visible(folder)
    classes = [name for name in names if tf.io.gfile.isdir(os.path.join(folder, name))]
    return classes, [name for name in names if name not in set(classes) and _is_image(name)]


def _check_classes(folder, found, expected):
    unknown = [name for name in found if name not in expected]
    if unknown:
        raise UserError(
            f"'{folder}' has class folder(s) of no known class: {', '.join(unknown)}; known, from "
            f'the training split or the weights, are: {", ".join(expected)}. Rename or remove them'
        )
    missing = [name for name in expected if name not in found]
    if missing:
        raise UserError(
            f"'{folder}' has no folder for class(es) {', '.join(missing)}; if there is meant to be "
            'no example of them, create an empty folder'
        )
