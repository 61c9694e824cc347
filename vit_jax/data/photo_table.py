"""A table of photos: one CSV file names every image, its labels, its split and its group.

The first row names the columns, in any order:

    file     a path, absolute or from the folder of the table
    label    the class of the image; or `labels`, several classes with semicolons between them
    split    optional: train, val, test or another name
    group    optional: images of one group show the same thing and belong into one split

    file,label,split,group
    photos/1.jpg,rose,train,plant 7

The columns in NOTES help a person to label photos; reading a table ignores them.
"""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vit_jax.data import table_cells
from vit_jax.data.images import is_image
from vit_jax.errors import UserError, nearest_names, some
from vit_jax.files import require_file, writing

FILE, LABEL, LABELS, SPLIT, GROUP = 'file', 'label', 'labels', 'split', 'group'
COLUMNS = (FILE, LABEL, LABELS, SPLIT, GROUP)
# The prediction for a photo without a label: fitting/unsure.py writes these columns.
NOTES = ('uncertainty', 'class1', 'probability1', 'class2', 'probability2', 'margin')
SUFFIX = '.csv'


class Row(NamedTuple):
    """One image of a table.

    Attributes:
      file: the absolute path.
      labels: the names of its classes; exactly one in a table with the column `label`.
      split: '' in a table without this column.
      group: '' for an image that is in no group.
    """

    file: str
    labels: tuple[str, ...]
    split: str = ''
    group: str = ''


class PhotoTable(NamedTuple):
    """The images of a table, in its order.

    Attributes:
      rows: at least one.
      multi_label: whether an image may have several labels.
    """

    rows: tuple[Row, ...]
    multi_label: bool

    def class_names(self) -> tuple[str, ...]:
        """The names of all classes, sorted."""
        return tuple(sorted({label for row in self.rows for label in row.labels}))

    def splits(self) -> tuple[str, ...]:
        """The names of all splits, sorted; () in a table without this column."""
        return tuple(sorted({row.split for row in self.rows} - {''}))


def is_table(path: str) -> bool:
    """Whether a path names a table of photos."""
    return path.lower().endswith(SUFFIX)


def read(path: str, require_files: bool = True) -> PhotoTable:
    """Read a table of photos.

    Args:
      path: the table.
      require_files: whether the images must exist.

    Raises:
      UserError: if the file cannot be read, a column is missing or unknown, or a row cannot be
        used. The error names the line.
    """
    lines = csv.reader(io.StringIO(_text_of(path), newline=''), strict=True)
    folder = os.path.dirname(os.path.abspath(path))
    rows: list[Row] = []
    line_of_file: dict[str, int] = {}
    try:
        columns = _columns(path, next(lines, []))
        for cells in lines:
            if not cells:
                continue
            where = f'{path}, line {lines.line_num}'
            row = _row(where, columns, cells, folder)
            if row.file in line_of_file:
                raise UserError(
                    f'{where} names {row.file!r}, and so does line {line_of_file[row.file]}: '
                    'expected one row for each image. Remove one of them.',
                    kind='content',
                    file=path,
                    value=row.file,
                )
            line_of_file[row.file] = lines.line_num
            rows.append(row)
    except csv.Error as error:
        raise UserError(
            f'{path}, line {lines.line_num}: {error}. Expected a CSV file with the columns '
            f'{FILE} and {LABEL}.',
            kind='content',
            file=path,
        ) from error
    if not rows:
        raise UserError(
            f'{path} has no rows: expected one for each image below the row of column names.',
            kind='content',
            file=path,
        )
    if require_files:
        _require_files(path, rows, line_of_file)
    return PhotoTable(tuple(rows), LABELS in columns)


def write(path: str, rows: Iterable[Row], multi_label: bool) -> None:
    """Write a table of photos, whole or not at all.

    Raises:
      UserError: if the file cannot be written.
    """
    header = [FILE, LABELS if multi_label else LABEL, SPLIT, GROUP]
    with (
        writing(path) as temporary,
        open(temporary, 'w', newline='', encoding='utf-8', errors='surrogateescape') as file,
    ):
        cells = ([row.file, ';'.join(row.labels), row.split, row.group] for row in rows)
        table_cells.write(file, header, cells)


def _text_of(path):
    require_file(path)
    try:
        with open(path, encoding='utf-8-sig', errors='surrogateescape', newline='') as file:
            return file.read()
    except OSError as error:
        raise UserError(
            f'{path} cannot be read ({error.strerror}): expected a CSV file.',
            kind='unreadable',
            file=path,
        ) from error


def _columns(path: str, header: Sequence[str]) -> dict[str, int]:
    """The number of each column by its name."""
    columns = {name.strip().lower(): number for number, name in enumerate(header)}
    for name in columns:
        if name not in COLUMNS and name not in NOTES:
            raise UserError(
                f'{path} has the column {name!r}. {nearest_names(name, COLUMNS)}Expected '
                f'{", ".join(COLUMNS)} in its first row.',
                kind='content',
                file=path,
                value=name,
            )
    if FILE not in columns or (LABEL in columns) == (LABELS in columns):
        raise UserError(
            f'{path} begins with {",".join(header)!r}: expected the names of its columns, '
            f'{FILE} and either {LABEL} or {LABELS} among them, as in {FILE},{LABEL}.',
            kind='content',
            file=path,
            value=','.join(header),
        )
    return columns


def _row(where, columns, cells, folder):
    if len(cells) != len(columns):
        raise UserError(
            f'{where} has {len(cells)} columns: expected {len(columns)}, as in the first row.',
            kind='content',
            file=where.partition(',')[0],
            value=len(cells),
        )
    texts = {name: table_cells.text_of(cells[k].strip()) for name, k in columns.items()}
    if LABEL in texts:
        labels: tuple[str, ...] = (texts[LABEL],)
    else:
        labels = tuple(label.strip() for label in texts[LABELS].split(';'))
    if not all(labels) or not texts[FILE]:
        raise UserError(
            f'{where} has an empty file or label: expected both. Remove the row if the image '
            'has no label.',
            kind='content',
            file=where.partition(',')[0],
        )
    file = os.path.normpath(os.path.join(folder, texts[FILE]))
    return Row(file, labels, texts.get(SPLIT, ''), texts.get(GROUP, ''))


def _require_files(path, rows, line_of_file):
    """Raise UserError if a row names something that is no image file."""
    wrong = [
        f'line {line_of_file[row.file]} names {row.file!r}'
        for row in rows
        if not is_image(row.file) or not os.path.isfile(row.file)
    ]
    if wrong:
        raise UserError(
            f'{path} names {len(wrong)} of {len(rows)} images that are not there: expected paths '
            f"of image files, absolute or from '{os.path.dirname(os.path.abspath(path))}'. Correct "
            f'or remove these rows:\n  {some(wrong, 20, between=chr(10) + "  ")}',
            kind='content',
            file=path,
            value=wrong,
        )
