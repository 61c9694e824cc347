"""Texts as cells of a CSV table that a spreadsheet does not execute as formulas.

A spreadsheet computes a cell that begins with =, +, -, @, a tab or a line break, so a file or class
with such a name could start a program. `cell` therefore puts an apostrophe in front. If a text
already has apostrophes before such a character, `cell` adds one more, so that `text_of` is the
exact inverse of `cell`. Numbers stay numbers.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_INERT = re.compile(r"'+[=+\-@\t\r\n]")


def cell(text: str) -> str:
    """The text as a cell, with an apostrophe in front if it could be a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def text_of(cell: str) -> str:
    """The text of a cell: the inverse of `cell`. A cell without an added apostrophe stays as is."""
    return cell[1:] if _INERT.match(cell) else cell


def write(file: TextIO, header: Sequence[str], rows: Iterable[Sequence[str | float]]) -> None:
    """Writes a table to a file that was opened with newline=''."""
    writer = csv.writer(file)
    writer.writerow([cell(name) for name in header])
    for row in rows:
        writer.writerow([cell(value) if isinstance(value, str) else value for value in row])
