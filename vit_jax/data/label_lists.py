"""Several labels for an image: as targets, and from a labels.csv beside images without classes.

A directory then has SPLIT/image files and SPLIT/labels.csv, whose rows are `file,label;label`. The
header `file,label` says that every image has one. Cells may be those of table_cells.
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

TABLE, CLASSES = 'labels.csv', 'classes.txt'
_HEADERS = ['file', 'labels'], ['file', 'label']  # the second one of single labels
_LISTED = 1000  # files in a message
# In the message of the operation that fails; data/broken.py makes one for users of it.
OUT_OF_RANGE = 'the label is none of the classes'


def multi_hot(
    labels: Int32[tf.Tensor, ' labels'], num_classes: int
) -> Float32[tf.Tensor, ' num_classes']:
    """1 for every class in a list of labels, which may be empty, and 0 for the others."""
    return tf.tensor_scatter_nd_update(
        tf.zeros([num_classes]), labels[:, None], tf.ones(tf.shape(labels))
    )


def checked(label: Int32[tf.Tensor, ''], num_classes: int) -> Int32[tf.Tensor, '']:
    """The label; the operation fails, with OUT_OF_RANGE, if it is not one of 0..num_classes-1."""
    is_class = (label >= 0) & (label < num_classes)
    with tf.control_dependencies([tf.debugging.Assert(is_class, [OUT_OF_RANGE, label])]):
        return tf.identity(label)


def pack(lists: Sequence[Sequence[int]]) -> tf.Tensor:
    """Lists of any lengths as a tensor of strings [lists], which `unpack` takes one by one."""
    return tf.constant([np.array(labels, np.int32).tobytes() for labels in lists], tf.string)


def unpack(packed: tf.Tensor) -> Int32[tf.Tensor, ' labels']:
    """The list of labels in an element of what `pack` returns."""
    return tf.io.decode_raw(packed, tf.int32)


def has_table(folder: str) -> bool:
    """Whether the images of a split have a labels.csv, and no folders of classes."""
    found = folders.entries(folder)
    return TABLE in found and ('folder' not in found.values() or any(map(is_image, found)))


def images(
    root: str, folder: str, class_names: Sequence[str] | None
) -> tuple[tuple[str, ...], list[tuple[str, list[int] | int, str]], bool]:
    """The classes, (name, label, kind of folders.entries) of every image, and if labels are lists.

    Args:
      root, folder: of the data set and of the split.
      class_names: in the order of their labels; None takes those in ROOT/classes.txt, and without
        that file the names in labels.csv, sorted.

    Raises UserError for images without a row, rows without an image, and what cannot be a label.
    """
    found = folders.entries(folder)
    kinds = {name: kind for name, kind in found.items() if is_image(name) and kind != 'folder'}
    path = os.path.join(folder, TABLE)
    rows, several = _rows(path, kinds)
    if inner := [
        name
        for name, kind in found.items()
        if kind == 'folder' and folders.has_image(os.path.join(folder, name))
    ]:
        raise UserError(
            f"'{folder}' has {TABLE} and folders with images: {some(inner)}. "
            f'{TABLE} names images beside it: move them there, or move it away if the '
            'folders are the classes.'
        )
    if missing := [name for name in kinds if name not in rows]:
        raise UserError(
            f'{path} has no row for {len(missing)} image(s) beside it: '
            f'{some(missing)}. Add rows FILE,LABEL;LABEL, or move them away.'
        )
    # Names that differ in Unicode normalisation only (see files.composed) are one class.
    spelled = sorted({label for labels in rows.values() for label in labels})
    named = list({composed(label): label for label in reversed(spelled)}.values())[::-1]
    where = 'the training split or the weights'
    if class_names is None:
        stated = os.path.join(root, CLASSES)
        class_names, where = (
            (_read(stated).split('\n'), stated) if tf.io.gfile.exists(stated) else (named, '')
        )
        class_names = tuple(
            table_cells.text_of(name.strip()) for name in class_names if name.strip()
        )
    numbers = {composed(name): label for label, name in enumerate(class_names)}
    if len(numbers) < len(class_names):
        raise UserError(f'{where} names a class twice: each stands once, class 0 first.')
    if unknown := [name for name in named if composed(name) not in numbers]:
        raise UserError(
            f'{path} has labels of unknown classes: {some(unknown)}; those of '
            f'{where} are: {some(class_names)}. Correct or remove them.'
        )
    labels = {name: [numbers[composed(label)] for label in row] for name, row in rows.items()}
    return (
        tuple(class_names),
        [
            (name, labels[name] if several else labels[name][0], kind)
            for name, kind in kinds.items()
        ],
        several,
    )


def _check_labels(where, name, labels, may_be_several):
    """Raises UserError unless a row has labels, and no more of them than its header allows."""
    if not all(labels):
        raise UserError(
            f'{where} has an empty label for {name!r}: expected one name or '
            'more, separated by semicolons. Remove the row and the image if '
            'it has none.'
        )
    if len(labels) > 1 and not may_be_several:
        raise UserError(
            f'{where} has {len(labels)} labels for {name!r}, and the header is '
            'file,label: expected one, or file,labels in the header.'
        )


def _rows(path, images):
    """{file: labels} of a labels.csv, and whether they may be several.

    Raises UserError, with the number of the row, for a wrong one.
    """
    rows = {}
    several = True
    by_form = {composed(name): name for name in images}
    unknown = {}  # name of a file that does not exist: where
    lines = csv.reader(io.StringIO(_read(path), newline=''), strict=True)
    try:
        for row in lines:
            if not rows and row in _HEADERS:
                several = row == _HEADERS[0]
                continue
            if not row:
                continue
            where = f'{path}, line {lines.line_num}'
            if len(row) != 2:
                raise UserError(f'{where} has {len(row)} column(s): expected FILE,LABEL;LABEL.')
            name = table_cells.text_of(row[0].strip())
            labels = [label.strip() for label in table_cells.text_of(row[1].strip()).split(';')]
            if name not in images:  # the disk may have it in another Unicode normalisation
                name = by_form.get(composed(name), name)
            if name not in images:
                unknown[name] = lines.line_num
                continue
            if name in rows:
                raise UserError(f'{where} names {name!r} again: put all its labels into one row.')
            _check_labels(where, name, labels, several)
            rows[name] = labels
    except csv.Error as error:
        raise UserError(
            f'{path}, line {lines.line_num}: {error}; expected FILE,LABEL;LABEL.'
        ) from error
    if unknown:
        rows_of_unknown = [f'line {line} names {name!r}' for name, line in unknown.items()]
        raise UserError(
            f'{path} names {len(unknown)} file(s) that are no image beside it. Expected the name '
            f"of an image in '{os.path.dirname(path)}' in each row, and in a header file,labels or "
            'file,label. Correct or remove these rows:\n  '
            + some(rows_of_unknown, _LISTED, between='\n  ')
        )
    return rows, several


def _read(path):
    """A text, also with the mark that spreadsheets write before it."""
    try:
        if '://' not in path and is_special(path):  # a pipe would be read for ever
            raise UserError(f'{path} is not a regular file.', kind='unreadable', file=path)
        with tf.io.gfile.GFile(path, 'rb') as file:
            return file.read().decode('utf-8-sig')
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise UserError(
            f'{path} cannot be read ({error}): expected a text file in UTF-8.',
            kind='unreadable',
            file=path,
        ) from error
