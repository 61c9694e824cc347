"""Which folders and files of a directory of images are splits, classes and images.

A directory has SPLIT/CLASS/image files; one without splits, CLASS/image files, is a flat one, whose
only split is 'train'.
"""

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence

from vit_jax.data.host_tensorflow import tf
from vit_jax.data.images import is_image
from vit_jax.errors import UserError, some
from vit_jax.files import composed, is_utf8, rename_or_locale

logger = logging.getLogger('vit_jax.data')
# A split is opened several times: for slices of it, and by each run of a sweep.
_say_once = functools.cache(logger.info)
_warn_once = functools.cache(logger.warning)

VALIDATION = ('val', 'valid', 'validation')  # the first of these that exists is taken
SILENCE = 5  # seconds of a scan from one line of the log to the next
_LEVELS = 2  # below a directory, in which one that fits is looked for
_MOST_LISTED = 50  # folders of one level, so that the search ends soon anywhere
_CLASSES_LISTED = 5  # of a directory that may have classes
_SPLITS = {'train', 'training', 'test', 'testing', 'eval', 'evaluation', *VALIDATION}


def entries(folder: str) -> dict[str, str]:
    """'folder', 'file' or 'other' by sorted name, without hidden ones.

    Others are pipes, devices, and links that lead nowhere. Raises UserError without the right to
    read the folder.
    """
    if '://' in folder:  # remote file systems add a slash to the names of folders
        found = {
            entry.rstrip('/'): 'folder'
            if entry.endswith('/')
            or (not is_image(entry) and tf.io.gfile.isdir(os.path.join(folder, entry)))
            else 'file'
            for entry in tf.io.gfile.listdir(folder)
        }
    else:
        try:
            with os.scandir(folder) as listed:
                found = {entry.name: _kind(entry) for entry in listed}
        except PermissionError as error:
            raise UserError(
                f"the folder '{folder}' cannot be listed ({error.strerror}): give this "
                'user the right to read and enter it, or move it away.'
            ) from error
    return {
        name: found[name]
        for name in sorted(found)
        if not name.startswith('.') and name != '__MACOSX'
    }  # macOS puts it into zip files


def _kind(entry):
    try:  # without a call of the system for each of a million files, as os.path.isdir would need
        return 'folder' if entry.is_dir() else 'file' if entry.is_file() else 'other'
    except OSError:  # a link in a loop
        return 'other'


def subfolders(folder: str) -> list[str]:
    """Sorted names of the visible folders in a folder."""
    return [name for name, kind in entries(folder).items() if kind == 'folder']


def split_folder(root: str, name: str) -> str:
    """The folder with the class folders of a split; UserError if there is none."""
    if not tf.io.gfile.isdir(root):
        seen_from = '' if os.path.isabs(root) or '://' in root else f' in {os.getcwd()}'
        raise UserError(
            f"no directory '{root}'{seen_from}; dataset.name is a directory with "
            "SPLIT/CLASS/image files, a TFDS name or 'digits'"
        )
    folders = subfolders(root)
    if name in folders:
        return os.path.join(root, name)
    if not _is_flat(root, folders):
        raise UserError(
            f"no split folder '{name}' in '{root}'; the folders there are: "
            f'{", ".join(folders) or "none"}. {_did_you_mean(_fitting(root, name))}Name one of '
            'them, or a slice such as train[:90%], in dataset.train_split, dataset.eval_split and '
            'dataset.test_split of a config or in --split of vit_jax.evaluate'
        )
    if name == 'train':
        _say_once(
            "'%s' has no split folders: 'train' is all of its %d class folders", root, len(folders)
        )
        _warn_of_other_splits(root)
        return root
    raise UserError(
        f"no split folder '{name}' in '{root}', whose folders {some(folders)} are classes. "
        f'{_did_you_mean(_fitting(root, name))}Either '
        f'make folders {root}/train/CLASS/ and {root}/{name}/CLASS/ and move the images there, or '
        'cut splits from all images: --config.dataset.train_split=train[:90%] '
        '--config.dataset.eval_split=train[90%:] (vit_jax.evaluate: --split=train[90%:])'
    )


def _is_flat(root, folders):
    return not any(name.lower() in _SPLITS for name in folders) and any(
        kind != 'folder' and is_image(name)
        for folder in folders
        for name, kind in entries(os.path.join(root, folder)).items()
    )


def _warn_of_other_splits(root):
    """Warns if the directory is itself one of several splits."""
    above = _above(root, 'train')
    if above and len(_splits_in(above[0])) > 1:
        _warn_once(
            "'%s' is one split of '%s', which has %s. %s",
            root,
            above[0],
            ', '.join(_splits_in(above[0])),
            _did_you_mean(above).strip(),
        )


def _did_you_mean(directories):
    """A question that names these directories, '' if there are none."""
    if not directories:
        return ''
    names = ' or '.join(f'--config.dataset.name={path}' for path in directories[:3])
    return f'Did you mean {names} (vit_jax.evaluate: --dataset)? '


def _fitting(root, split):
    """The directories above or below `root` that have the split."""
    return _above(root, split) or _below(root, split)


def _above(root, split):
    """The directory of which `root` is a split, a class of a split, or a class; [] if none is."""
    if '://' in root:
        return []
    parent, name = os.path.split(os.path.abspath(root))
    grandparent, name_of_parent = os.path.split(parent)
    if name_of_parent.lower() in _SPLITS and split in _folders(grandparent):
        return [grandparent]
    if name.lower() in _SPLITS and split in _folders(parent):
        return [parent]
    is_class = any(is_image(file) for file in entries(root))
    if is_class and split == 'train' and _looks_flat(parent):
        return [parent]
    return []


def _below(root, split):
    """The directories that have the split, of the first level below `root` with one; [] if none."""
    if '://' in root:  # listing folders takes long there
        return []
    level = [root]
    for _ in range(_LEVELS):
        level = [os.path.join(path, name) for path in level for name in _folders(path)]
        level = level[:_MOST_LISTED]
        fitting = [path for path in level if split in _folders(path)]
        if not fitting and split == 'train':
            fitting = [path for path in level if _looks_flat(path)]
        if fitting:
            return fitting
    return []


def _splits_in(root):
    return [name for name in _folders(root) if name.lower() in _SPLITS]


def _looks_flat(root):
    """Whether the folders are two classes or more and no splits, as far as the first ones tell."""
    folders = _folders(root)
    if len(folders) < 2 or _splits_in(root):
        return False
    try:
        return _is_flat(root, folders[:_CLASSES_LISTED])
    except (UserError, OSError):
        return False


def _folders(path):
    """The first folders in a folder, [] where it cannot be read."""
    try:
        return subfolders(path)[:_MOST_LISTED]
    except (UserError, OSError):
        return []


def choose_splits(name: str, train_split: str, eval_split: str) -> tuple[str, str]:
    """The splits of training and evaluation, by the folders that exist; says what it takes.

    In a directory without the folder of `eval_split`, or where that is '', a folder of VALIDATION
    takes its place. Where there is none, '' holds out a tenth of the training split.
    """
    root = os.path.expanduser(name)
    wanted = eval_split.partition('[')[0]
    folders = subfolders(root) if tf.io.gfile.isdir(root) else []
    found = next((folder for folder in VALIDATION if folder in folders), '')
    if found and wanted not in folders:
        logger.info(
            "evaluation takes '%s'%s",
            os.path.join(root, found),
            wanted and (f": there is no folder '{wanted}'"),
        )
        return train_split, found + eval_split[len(wanted) :]
    if eval_split:
        return train_split, eval_split
    if '[' in train_split:
        raise UserError(
            f'dataset.eval_split is empty and dataset.train_split is {train_split}: '
            'name the rest, as in train[90%:] for train[:90%].'
        )
    logger.info(
        'evaluation takes the last 10 %% of %s, which training leaves out%s',
        train_split,
        f": there is no folder {', '.join(VALIDATION)} in '{root}'" if folders else '',
    )
    return f'{train_split}[:90%]', f'{train_split}[90%:]'


def held_out_splits(name: str) -> list[str] | None:
    """The split folders of a directory besides those of training; None if it is no directory."""
    root = os.path.expanduser(name)
    if name == 'digits' or not tf.io.gfile.isdir(root):
        return None
    return [folder for folder in _splits_in(root) if folder.lower() not in ('train', 'training')]


def class_contents(
    folder: str, expected: Sequence[str] | None
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The entries of each class folder of a split, by the sorted names of the folders.

    Also returns the class of each folder: its own name, or the expected one that differs from it in
    Unicode normalisation only. Raises UserError if there are images beside the class folders or in
    folders inside of them, or the classes differ from those expected.
    """
    scan = _Progress(folder)
    found = entries(folder)
    names = [name for name, kind in found.items() if kind == 'folder']
    if stray := [name for name, kind in found.items() if kind != 'folder' and is_image(name)]:
        raise UserError(
            f"'{folder}' has {len(stray)} image(s) outside of class folders, for example "
            f"'{stray[0]}'; move each to {folder}/CLASS/"
        )
    if odd := [name for name in names if not is_utf8(name)]:
        raise UserError(
            f"'{folder}' has class folder(s) with names that are not in UTF-8: "
            f'{", ".join(map(repr, odd))}. {rename_or_locale()}'
        )
    classes = _classes_of_folders(folder, names, names if expected is None else expected)
    contents = {}
    for number, name in enumerate(names):
        contents[name] = entries(os.path.join(folder, name))
        scan.report(number + 1, len(names))
    nested = [
        os.path.join(name, inner)
        for name, kinds in contents.items()
        for inner, kind in kinds.items()
        if kind == 'folder' and has_image(os.path.join(folder, name, inner))
    ]
    if nested:
        inner_directories = _below(folder, 'train')
        if len(classes) > 1:  # a class may have folders of kinds, which are no classes
            inner_directories = [path for path in inner_directories if _splits_in(path)]
        raise UserError(
            f"the class folders of '{folder}' have images in folders of their own: "
            f'{some(nested)}. {_did_you_mean(inner_directories)}Each class is one folder with its '
            'images directly in it: move them '
            f'to {folder}/CLASS/'
        )
    return contents, classes


def _classes_of_folders(folder, names, expected):
    """{name of a folder: class}; UserError unless there is one folder for each expected class."""
    by_form = {composed(name): name for name in expected}
    classes = {name: by_form.get(composed(name)) for name in names}
    if unknown := [name for name, known in classes.items() if known is None]:
        raise UserError(
            f"'{folder}' has class folder(s) of unknown classes: {some(unknown)}; those of "
            f'the training split or the weights are: {some(expected)}. Name other data or weights, '
            'or rename or remove these folders'
        )
    forms = Counter(map(composed, names))
    if alike := [name for name in names if forms[composed(name)] > 1]:
        raise UserError(
            f"'{folder}' has class folders whose names differ in Unicode normalisation only (NFC "
            f'and NFD), and look the same: {some([ascii(name) for name in alike])}. Move the '
            'images of each class into one folder.'
        )
    known = set(classes.values())
    if missing := [name for name in expected if name not in known]:
        raise UserError(
            f"'{folder}' has no folder for class(es) {some(missing)}; if no example of them "
            'is intended, create an empty folder'
        )
    return classes


class _Progress:
    """Reports how far the listing of a folder is, when it takes long."""

    def __init__(self, folder):
        self._folder = folder
        self._said = time.monotonic()

    def report(self, done, total):
        if time.monotonic() - self._said >= SILENCE:
            self._said = time.monotonic()
            logger.info("listing '%s': %d of %d class folders", self._folder, done, total)


def has_image(folder: str) -> bool:
    """Whether there is an image file anywhere below a folder."""
    walk = tf.io.gfile.walk if '://' in folder else os.walk  # os.walk follows no links into loops
    return any(is_image(name) for _, _, names in walk(folder) for name in names)
