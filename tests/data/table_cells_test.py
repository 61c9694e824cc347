"""Texts as cells of a CSV table: escaped, and unescaped without loss."""

import csv
import io
import itertools

import pytest

from vit_jax.data import table_cells

CHARACTERS = '=+-@\t\r\n\'a; ,"'


@pytest.mark.parametrize('first', '=+-@\t\r\n')
def test_texts_that_could_be_formulas_get_an_apostrophe(first):
    assert table_cells.cell(f'{first}1+1') == f"'{first}1+1"


@pytest.mark.parametrize('text', ['', 'ant', "'ant", "o'clock", ' =x', 'a=b', '1.5', 'é'])
def test_other_texts_do_not_change(text):
    assert table_cells.cell(text) == text
    assert table_cells.text_of(text) == text


def test_every_text_survives_a_table():
    texts = [
        ''.join(characters)
        for length in range(4)
        for characters in itertools.product(CHARACTERS, repeat=length)
    ]
    file = io.StringIO(newline='')
    csv.writer(file).writerows([table_cells.cell(text), 'x'] for text in texts)
    file.seek(0)
    rows = [row[0] for row in csv.reader(file)]
    assert not [row for row in rows if row.startswith(tuple('=+-@\t\r\n'))]
    assert [table_cells.text_of(row) for row in rows] == texts
