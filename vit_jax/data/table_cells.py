"""Texts as cells of a CSV table that a spreadsheet cannot take for formulas.

A spreadsheet computes a cell that begins with =, +, -, @, a tab or the end of a line: a file or a
class of such a name could start a program. The cell gets an apostrophe in front, and a text of
apostrophes before such a character gets one more, so that `text_of` is the exact inverse of `cell`.
Numbers are not texts: they stay numbers.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_INERT = re.compile(r"'+[=+\-@\t\r\n]")


def cell(text: str) -> str:
    """The text as a cell, with an apostrophe in front where it could be a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def text_of(cell: str) -> str:
    """The text that `cell` made a cell of; other cells are returned as they are."""
    return cell[1:] if _INERT.match(cell) else cell


def write(file: TextIO, header: Sequence[str], rows: Iterable[Sequence[str | float]]) -> None:
    """Writes a table to a file that is open with newline=''."""
    writer = csv.writer(file)
    writer.writerow([cell(name) for name in header])
    for row in rows:
        writer.writerow([cell(value) if isinstance(value, str) else value for value in row])
