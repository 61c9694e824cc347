"""Which folders and files of a directory of images are splits, classes and images.

A directory has SPLIT/CLASS/image files. A flat directory has CLASS/image files; its only split is
'train'.
"""

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence

from vit_jax.data import folds, photo_table
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.images import is_image
from vit_jax.errors import UserError, some
from vit_jax.files import composed, is_utf8, rename_or_locale

logger = logging.getLogger('vit_jax.data')
# A split is opened several times: for its slices, and by each run of a sweep.
_log_once = functools.cache(logger.info)
_warn_once = functools.cache(logger.warning)

VALIDATION = ('val', 'valid', 'validation')  # the first of these folders that exists is used
SILENCE = 5  # seconds between two lines of the log during a scan
_SEARCH_LEVELS = 2  # levels that the search for a similar directory descends
_MAX_FOLDERS = 50  # folders per level in this search, so that it ends soon in any directory
_MAX_CLASSES = 5  # class folders in the test whether a directory is flat
_SPLITS = {'train', 'training', 'test', 'testing', 'eval', 'evaluation', *VALIDATION}


def entries(folder: str) -> dict[str, str]:
    """The visible entries of a folder by sorted name: 'folder', 'file' or 'other'.

    Pipes, devices and broken links are 'other'.

    Raises:
      UserError: if this user may not read the folder.
    """
    kinds = _remote_entries(folder) if '://' in folder else _local_entries(folder)
    # macOS adds __MACOSX to zip files.
    return {
        name: kinds[name]
        for name in sorted(kinds)
        if not name.startswith('.') and name != '__MACOSX'
    }


def _remote_entries(folder):
    kinds = {}
    for entry in tf.io.gfile.listdir(folder):
        name = entry.rstrip('/')
        if entry.endswith('/'):  # as some file systems mark folders
            kinds[name] = 'folder'
        elif is_image(name) or not tf.io.gfile.isdir(os.path.join(folder, name)):
            kinds[name] = 'file'
        else:
            kinds[name] = 'folder'
    return kinds


def _local_entries(folder):
    try:
        with os.scandir(folder) as listed:
            return {entry.name: _kind(entry) for entry in listed}
    except PermissionError as error:
        raise UserError(
            f"the folder '{folder}' cannot be listed ({error.strerror}): give this "
            'user permission to read and enter it, or move it away.',
            kind='unreadable',
            file=folder,
        ) from error


def _kind(entry):
    # os.path.isdir would need a system call for each of a million files.
    try:
        if entry.is_dir():
            return 'folder'
        if entry.is_file():
            return 'file'
    except OSError:  # a link in a loop
        pass
    return 'other'


def subfolders(folder: str) -> list[str]:
    """Sorted names of the visible folders in a folder."""
    return [name for name, kind in entries(folder).items() if kind == 'folder']


def split_folder(root: str, name: str) -> str:
    """The folder with the class folders of a split.

    Raises:
      UserError: if there is no such folder.
    """
    if not tf.io.gfile.isdir(root):
        seen_from = ''
        if not os.path.isabs(root) and '://' not in root:
            seen_from = f' in {os.getcwd()}'
        raise UserError(
            f"no directory '{root}'{seen_from}: expected dataset.name to be a directory with "
            "SPLIT/CLASS/image files, the name of a TFDS set, or 'digits'.",
            kind='missing',
            field='dataset.name',
            file=root,
        )
    folders = subfolders(root)
    if name in folders:
        return os.path.join(root, name)
    if not _is_flat(root, folders):
        raise UserError(
            f"no split folder '{name}' in '{root}'; the folders there are: "
            f'{", ".join(folders) or "none"}. {_did_you_mean(_fitting(root, name))}Name one of '
            'them, or a slice such as train[:90%], in dataset.train_split, dataset.eval_split and '
            'dataset.test_split of a config or in --split of vit_jax.evaluate.',
            kind='unknown',
            file=root,
            value=name,
        )
    if name == 'train':
        _log_once(
            "'%s' has no split folders: 'train' is all of its %d class folders", root, len(folders)
        )
        _warn_of_other_splits(root)
        return root
    raise UserError(
        f"no split folder '{name}' in '{root}', whose folders {some(folders)} are classes. "
        f'{_did_you_mean(_fitting(root, name))}Either '
        f'make folders {root}/train/CLASS/ and {root}/{name}/CLASS/ and move the images there, or '
        'cut splits from all images: --config.dataset.train_split=train[:90%] '
        '--config.dataset.eval_split=train[90%:] (vit_jax.evaluate: --split=train[90%:]).',
        kind='unknown',
        file=root,
        value=name,
    )


def _is_flat(root, folders):
    """Whether the folders are classes: none has the name of a split, and one has images."""
    if any(name.lower() in _SPLITS for name in folders):
        return False
    return any(_has_image_directly(os.path.join(root, folder)) for folder in folders)


def _has_image_directly(folder):
    return any(kind != 'folder' and is_image(name) for name, kind in entries(folder).items())


def _warn_of_other_splits(root):
    """Warns if the directory is one of several splits of its parent."""
    parents = _above(root, 'train')
    if not parents:
        return
    splits = _splits_in(parents[0])
    if len(splits) > 1:
        _warn_once(
            "'%s' is one split of '%s', which has %s. %s",
            root,
            parents[0],
            ', '.join(splits),
            _did_you_mean(parents).strip(),
        )


def _did_you_mean(directories):
    """A question that proposes these directories; '' if there are none."""
    if not directories:
        return ''
    names = ' or '.join(f'--config.dataset.name={path}' for path in directories[:3])
    return f'Did you mean {names} (vit_jax.evaluate: --dataset)? '


def _fitting(root, split):
    """The directories above or below `root` that have the split."""
    return _above(root, split) or _below(root, split)


def _above(root, split):
    """[the data set whose split, class of a split, or class is `root`]; [] if there is none."""
    if '://' in root:
        return []
    parent, name = os.path.split(os.path.abspath(root))
    grandparent, name_of_parent = os.path.split(parent)
    if name_of_parent.lower() in _SPLITS and split in _first_folders(grandparent):
        return [grandparent]
    if name.lower() in _SPLITS and split in _first_folders(parent):
        return [parent]
    is_class = any(is_image(file) for file in entries(root))
    if is_class and split == 'train' and _looks_flat(parent):
        return [parent]
    return []


def _below(root, split):
    """The directories on the first level below `root` that has any with the split; else []."""
    if '://' in root:  # listing folders is slow there
        return []
    level = [root]
    for _ in range(_SEARCH_LEVELS):
        next_level = []
        for path in level:
            next_level += [os.path.join(path, name) for name in _first_folders(path)]
        level = next_level[:_MAX_FOLDERS]
        fitting = [path for path in level if split in _first_folders(path)]
        if not fitting and split == 'train':
            fitting = [path for path in level if _looks_flat(path)]
        if fitting:
            return fitting
    return []


def _splits_in(root):
    return [name for name in _first_folders(root) if name.lower() in _SPLITS]


def _looks_flat(root):
    """Whether there are two or more class folders and no splits, judged by the first folders."""
    folders = _first_folders(root)
    if len(folders) < 2 or _splits_in(root):
        return False
    try:
        return _is_flat(root, folders[:_MAX_CLASSES])
    except (UserError, OSError):
        return False


def _first_folders(path):
    """The first folders in a folder; [] if the folder cannot be read."""
    try:
        return subfolders(path)[:_MAX_FOLDERS]
    except (UserError, OSError):
        return []


def choose_splits(name: str, train_split: str, eval_split: str) -> tuple[str, str]:
    """Chooses and logs the splits for training and evaluation, according to the folders that exist.

    If a directory has no folder for `eval_split`, or `eval_split` is '', the first existing folder
    of VALIDATION is used. If there is none either, '' holds out a tenth of the training split.
    """
    root = os.path.expanduser(name)
    evaluated, _ = folds.parse(eval_split)
    wanted = evaluated.partition('[')[0]
    folders: Sequence[str] = ()
    if photo_table.is_table(root):
        folders = photo_table.read(root).splits()
    elif tf.io.gfile.isdir(root):
        folders = subfolders(root)
    validation = next((folder for folder in VALIDATION if folder in folders), '')
    if validation and wanted not in folders:
        reason = ''
        if wanted:
            reason = f": there is no folder '{wanted}'"
        logger.info("Evaluating on '%s'%s", os.path.join(root, validation), reason)
        return train_split, validation + eval_split[len(wanted) :]
    if eval_split:
        return train_split, eval_split
    is_fold = folds.parse(train_split)[1] is not None
    if is_fold or '[' in train_split:
        raise UserError(
            f'dataset.eval_split is empty and dataset.train_split is {train_split}: '
            'set dataset.eval_split to the rest, such as train[90%:] for train[:90%].',
            kind='missing',
            field='dataset.eval_split',
        )
    reason = ''
    if folders:
        reason = f": there is no folder {', '.join(VALIDATION)} in '{root}'"
    logger.info(
        'Evaluating on the last 10 %% of %s, which training does not use%s', train_split, reason
    )
    return f'{train_split}[:90%]', f'{train_split}[90%:]'


def held_out_splits(name: str) -> list[str] | None:
    """The split folders of a directory except the training split; None without a directory."""
    root = os.path.expanduser(name)
    if name == 'digits' or not tf.io.gfile.isdir(root):
        return None
    return [folder for folder in _splits_in(root) if folder.lower() not in ('train', 'training')]


def class_contents(
    folder: str, expected: Sequence[str] | None
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Lists the class folders of a split.

    Args:
      expected: the classes that the split must have; None accepts any classes.

    Returns:
      The entries of each class folder, by its sorted name; and the class of each folder: its own
      name, or the expected name that differs from it in Unicode normalisation only.

    Raises:
      UserError: if there are images next to the class folders or in their subfolders, or the
        classes differ from `expected`.
    """
    progress = _Progress(folder)
    kinds = entries(folder)
    names = [name for name, kind in kinds.items() if kind == 'folder']
    _check_entries(folder, kinds, names)
    if expected is None:
        expected = names
    classes = _classes_of_folders(folder, names, expected)
    contents = {}
    for number, name in enumerate(names, 1):
        contents[name] = entries(os.path.join(folder, name))
        progress.report(number, len(names))
    _check_not_nested(folder, contents, len(classes))
    return contents, classes


def _check_entries(folder, kinds, class_folders):
    """Raises UserError for images outside class folders, or for names that are not UTF-8."""
    stray_images = [name for name, kind in kinds.items() if kind != 'folder' and is_image(name)]
    if stray_images:
        raise UserError(
            f"'{folder}' has {len(stray_images)} image(s) outside class folders, for example "
            f"'{stray_images[0]}'. Move each to {folder}/CLASS/.",
            kind='content',
            file=folder,
            value=stray_images,
        )
    not_utf8 = [name for name in class_folders if not is_utf8(name)]
    if not_utf8:
        raise UserError(
            f"'{folder}' has class folder(s) with names that are not in UTF-8: "
            f'{", ".join(map(repr, not_utf8))}. {rename_or_locale()}',
            kind='content',
            file=folder,
            value=not_utf8,
        )


def _check_not_nested(folder, contents, num_classes):
    """Raises UserError if a class folder has a subfolder with images."""
    nested = []
    for name, kinds in contents.items():
        inner_folders = [os.path.join(name, inner) for inner in kinds if kinds[inner] == 'folder']
        nested += [path for path in inner_folders if has_image(os.path.join(folder, path))]
    if not nested:
        return
    inner_directories = _below(folder, 'train')
    if num_classes > 1:  # the folders inside a class may be subclasses, which are not classes
        inner_directories = [path for path in inner_directories if _splits_in(path)]
    raise UserError(
        f"the class folders of '{folder}' have subfolders with images: {some(nested)}. "
        f'{_did_you_mean(inner_directories)}Each class is one folder with its '
        f'images directly in it: move them to {folder}/CLASS/.',
        kind='content',
        file=folder,
        value=nested,
    )


def _classes_of_folders(folder, names, expected):
    """{name of a folder: class}; UserError unless there is one folder for each expected class."""
    by_form = {composed(name): name for name in expected}
    classes = {name: by_form.get(composed(name)) for name in names}
    unknown = [name for name, class_name in classes.items() if class_name is None]
    if unknown:
        raise UserError(
            f"'{folder}' has class folder(s) of unknown classes: {some(unknown)}; the classes of "
            f'the training split or the weights are: {some(expected)}. Use other data or weights, '
            'or rename or remove these folders.',
            kind='content',
            file=folder,
            value=unknown,
        )
    forms = Counter(map(composed, names))
    alike = [name for name in names if forms[composed(name)] > 1]
    if alike:
        raise UserError(
            f"'{folder}' has class folders whose names differ in Unicode normalisation only (NFC "
            f'and NFD), and look the same: {some([ascii(name) for name in alike])}. Move the '
            'images of each class into one folder.',
            kind='content',
            file=folder,
            value=alike,
        )
    found_classes = set(classes.values())
    missing = [name for name in expected if name not in found_classes]
    if missing:
        raise UserError(
            f"'{folder}' has no folder for class(es) {some(missing)}. If the split intentionally "
            'has no example of them, create an empty folder for each.',
            kind='missing',
            file=folder,
            value=missing,
        )
    return classes


class _Progress:
    """Logs the progress of listing class folders when it takes long."""

    def __init__(self, folder):
        self._folder = folder
        self._last_report = time.monotonic()

    def report(self, done, total):
        if time.monotonic() - self._last_report >= SILENCE:
            self._last_report = time.monotonic()
            logger.info("Listed %d of %d class folders in '%s'", done, total, self._folder)


def has_image(folder: str) -> bool:
    """Whether there is an image file anywhere below a folder."""
    # os.walk does not follow links, so a loop of links is harmless.
    walk = tf.io.gfile.walk if '://' in folder else os.walk
    return any(any(map(is_image, names)) for _, _, names in walk(folder))
