"""Labels of multi-label images as targets, and labels.csv for images without class folders.

A directory without class folders has SPLIT/image files and SPLIT/labels.csv, whose rows are
`file,label;label`. The header `file,label` states that every image has one label. Cells may be
escaped by table_cells.
"""

import csv
import io
import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int32

from vit_jax.data import folders, table_cells
from vit_jax.data.host_tensorflow import tf
from vit_jax.data.images import is_image
from vit_jax.errors import UserError, some
from vit_jax.files import composed, is_special

TABLE = 'labels.csv'
CLASSES = 'classes.txt'
_HEADER_OF_LISTS = ['file', 'labels']
_HEADER_OF_SINGLE_LABELS = ['file', 'label']
_MAX_LISTED = 1000  # files in a message
# The message of the operation that fails; data/broken.py replaces it by a message for users.
OUT_OF_RANGE = 'the label is none of the classes'


def multi_hot(
    labels: Int32[tf.Tensor, ' labels'], num_classes: int
) -> Float32[tf.Tensor, ' num_classes']:
    """1 for every class in a list of labels, which may be empty, and 0 for the other classes."""
    return tf.tensor_scatter_nd_update(
        tf.zeros([num_classes]), labels[:, None], tf.ones(tf.shape(labels))
    )


def checked(label: Int32[tf.Tensor, ''], num_classes: int) -> Int32[tf.Tensor, '']:
    """The label; the operation fails with OUT_OF_RANGE unless it is in 0..num_classes-1."""
    is_class = (label >= 0) & (label < num_classes)
    with tf.control_dependencies([tf.debugging.Assert(is_class, [OUT_OF_RANGE, label])]):
        return tf.identity(label)


def pack(lists: Sequence[Sequence[int]]) -> tf.Tensor:
    """A tensor of strings [lists], one for each list of any length; `unpack` reads one element."""
    return tf.constant([np.array(labels, np.int32).tobytes() for labels in lists], tf.string)


def unpack(packed: tf.Tensor) -> Int32[tf.Tensor, ' labels']:
    """The list of labels in one element of the tensor from `pack`."""
    return tf.io.decode_raw(packed, tf.int32)


def has_table(folder: str) -> bool:
    """Whether the images of a split have a labels.csv, and no class folders."""
    kinds = folders.entries(folder)
    return TABLE in kinds and ('folder' not in kinds.values() or any(map(is_image, kinds)))


def images(
    root: str, folder: str, class_names: Sequence[str] | None, suffixes: tuple[str, ...]
) -> tuple[tuple[str, ...], list[tuple[str, list[int] | int, str]], bool]:
    """Reads the labels.csv of a split.

    Args:
      root: the directory of the data set.
      folder: the folder of the split.
      class_names: the classes in the order of their labels. None uses the classes in
        ROOT/classes.txt; without this file, the sorted names in labels.csv.
      suffixes: the endings of images.

    Returns:
      The classes; (name, label, kind as in folders.entries) for every image; and whether each label
      is a list of labels.

    Raises:
      UserError: for images without a row, rows without an image, and invalid labels.
    """
    entry_kinds = folders.entries(folder)
    image_kinds = {
        name: kind
        for name, kind in entry_kinds.items()
        if is_image(name, suffixes) and kind != 'folder'
    }
    path = os.path.join(folder, TABLE)
    rows, several = _rows(path, image_kinds)
    _check_no_image_folders(folder, entry_kinds)
    _check_every_image_has_a_row(path, rows, image_kinds)
    names_in_table = _class_names_in(rows)
    known_from = 'the training split or the weights'
    class_file = None
    if class_names is None:
        class_list = os.path.join(root, CLASSES)
        if tf.io.gfile.exists(class_list):
            lines = [line.strip() for line in _read(class_list).split('\n')]
            class_names = [table_cells.text_of(line) for line in lines if line]
            known_from = class_list
            class_file = class_list
        else:
            class_names = names_in_table
    class_names = tuple(class_names)
    numbers = {composed(name): label for label, name in enumerate(class_names)}
    if len(numbers) < len(class_names):
        raise UserError(
            f'{known_from} names a class twice: expected each class once, class 0 first.',
            kind='content',
            file=class_file,
        )
    unknown = [name for name in names_in_table if composed(name) not in numbers]
    if unknown:
        raise UserError(
            f'{path} has labels of unknown classes: {some(unknown)}; the classes of {known_from} '
            f'are: {some(class_names)}. Correct or remove them.',
            kind='content',
            file=path,
            value=unknown,
        )
    labelled_images: list[tuple[str, list[int] | int, str]] = []
    for name, kind in image_kinds.items():
        labels = [numbers[composed(label)] for label in rows[name]]
        if several:
            labelled_images.append((name, labels, kind))
        else:
            labelled_images.append((name, labels[0], kind))
    return class_names, labelled_images, several


def _class_names_in(rows):
    """The sorted names of classes in the rows of a table.

    Names that differ only in Unicode normalisation (see files.composed) are one class. The class
    has the name that sorts first, at the position of the name that sorts last.
    """
    spellings = set()
    for labels in rows.values():
        spellings.update(labels)
    name_of_form = {}
    for name in sorted(spellings, reverse=True):
        name_of_form[composed(name)] = name
    return list(reversed(name_of_form.values()))


def _check_no_image_folders(folder, kinds):
    """Raises UserError if a folder with a table has folders with images."""
    image_folders = [
        name
        for name, kind in kinds.items()
        if kind == 'folder' and folders.has_image(os.path.join(folder, name))
    ]
    if image_folders:
        raise UserError(
            f"'{folder}' has {TABLE} and folders with images: {some(image_folders)}. {TABLE} "
            'lists images in its own folder: move the images there, or move the table away if the '
            'folders are the classes.',
            kind='content',
            file=folder,
            value=image_folders,
        )


def _check_every_image_has_a_row(path, rows, images):
    """Raises UserError for images that a table does not list."""
    missing = [name for name in images if name not in rows]
    if missing:
        raise UserError(
            f'{path} has no row for {len(missing)} image(s) in its folder: {some(missing)}. Add '
            'rows FILE,LABEL;LABEL, or move the images away.',
            kind='missing',
            file=path,
            value=missing,
        )


def _check_labels(path, where, name, labels, several):
    """Raises UserError unless a row has as many labels as the header of its table allows."""
    if not all(labels):
        raise UserError(
            f'{where} has an empty label for {name!r}: expected one or more names, separated by '
            'semicolons. If the image has no label, remove the row and the image.',
            kind='content',
            file=path,
            value=name,
        )
    if len(labels) > 1 and not several:
        raise UserError(
            f'{where} has {len(labels)} labels for {name!r}, but the header is '
            'file,label: expected one label, or file,labels in the header.',
            kind='content',
            file=path,
            value=name,
        )


def _rows(path, images):
    """Returns {file: labels} from a labels.csv, and whether an image may have several labels.

    Raises UserError, with the line number, for an invalid row.
    """
    rows = {}
    several = True
    by_form = {composed(name): name for name in images}
    unknown = {}  # name of a missing file: number of its line
    lines = csv.reader(io.StringIO(_read(path), newline=''), strict=True)
    try:
        for row in lines:
            if not rows and row in (_HEADER_OF_LISTS, _HEADER_OF_SINGLE_LABELS):
                several = row == _HEADER_OF_LISTS
                continue
            if not row:
                continue
            where = f'{path}, line {lines.line_num}'
            if len(row) != 2:
                raise UserError(
                    f'{where} has {len(row)} column(s): expected FILE,LABEL;LABEL.',
                    kind='content',
                    file=path,
                    value=row,
                )
            name = table_cells.text_of(row[0].strip())
            labels = [label.strip() for label in table_cells.text_of(row[1].strip()).split(';')]
            if name not in images:  # the disk may have it in another Unicode normalisation
                name = by_form.get(composed(name), name)
            if name not in images:
                unknown[name] = lines.line_num
                continue
            if name in rows:
                raise UserError(
                    f'{where} names {name!r} again: put all labels of an image into one row.',
                    kind='content',
                    file=path,
                    value=name,
                )
            _check_labels(path, where, name, labels, several)
            rows[name] = labels
    except csv.Error as error:
        raise UserError(
            f'{path}, line {lines.line_num}: {error}; expected FILE,LABEL;LABEL.',
            kind='content',
            file=path,
        ) from error
    if unknown:
        problems = [f'line {line} names {name!r}' for name, line in unknown.items()]
        raise UserError(
            f'{path} names {len(unknown)} file(s) that are not images in its folder. Expected the '
            f"name of an image in '{os.path.dirname(path)}' in each row, and a header file,labels "
            'or file,label. Correct or remove these rows:\n  '
            + some(problems, _MAX_LISTED, between='\n  '),
            kind='content',
            file=path,
            value=list(unknown),
        )
    return rows, several


def _read(path):
    """The text of a file, without the byte-order mark that spreadsheets write before the text."""
    if '://' not in path and is_special(path):  # reading a pipe would never end
        raise UserError(f'{path} is not a regular file.', kind='unreadable', file=path)
    try:
        with tf.io.gfile.GFile(path, 'rb') as file:
            return file.read().decode('utf-8-sig')
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise UserError(
            f'{path} cannot be read ({error}): expected a text file in UTF-8.',
            kind='unreadable',
            file=path,
        ) from error
