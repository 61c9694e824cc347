"""The commands of the pages about fit, run in their order on a few small photos."""

import importlib
import re
import shlex
import shutil

import pytest

from tests.support import documentation, interop, small
from tests.support.datasets import write_images
from tests.support.runs import ROOT, run_here
from vit_jax import weights as weights_lib
from vit_jax.data import photo_table

CLASSES = ['daisy', 'tulip']


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory of a reader, with photos and weights."""
    monkeypatch.chdir(tmp_path)
    weights_lib.save(small.make('vit'), 'pretrained.safetensors', 'vit_jax')
    write_images(tmp_path / 'photos', CLASSES, 12)
    write_images(tmp_path / 'new', CLASSES, 3, seed=1)
    (tmp_path / 'more').mkdir()
    for path in sorted((tmp_path / 'new').rglob('*.png')):
        shutil.copy(path, tmp_path / 'more' / f'{path.parent.name}{path.name}')
    return tmp_path


def run(module, arguments):
    """Runs a command of a page, with small weights and one minute."""
    changed = []
    for argument in arguments:
        argument = re.sub(
            r'^--pretrained=(timm:.*|WEIGHTS)$', '--pretrained=pretrained.safetensors', argument
        )
        changed.append(re.sub(r'^--minutes=\d+$', '--minutes=1', argument))
    result = run_here(*changed, command=importlib.import_module(module))
    assert result.returncode == 0, result.stderr


def lines_of(page):
    text = '\n'.join(documentation.blocks((ROOT / page).read_text(), 'sh'))
    for line in text.replace('\\\n', ' ').splitlines():
        if line:
            yield shlex.split(line)


def label_the_unsure_photos(folder):
    """What the tutorial asks for: labels of the first rows of next.csv in labels.csv."""
    lines = (folder / 'next.csv').read_text().splitlines()
    assert lines[0].startswith('file,label,')
    with open(folder / 'labels.csv', 'a', encoding='utf-8') as table:
        for line in lines[1:4]:
            file = line.split(',')[0]
            label = next(name for name in CLASSES if f'/{name}' in file)
            table.write(f'{file},{label},,\n')


@pytest.mark.slow
def test_tutorial_of_own_photos(folder):
    modules = []
    for words in lines_of('docs/tutorials/own-photos.md'):
        if words[0] == 'cp':
            shutil.copy(*words[1:])
        elif words[0] == 'python':
            if '--to=onnx' in words:
                interop.require('jax2onnx')
            run(words[2], words[3:])
            modules.append(words[2])
        if words[-1] == 'more':
            label_the_unsure_photos(folder)
    first, second, third = (
        photo_table.read(str(folder / f'runs/fit-{name}/photos.csv'))
        for name in ('photos', 'labels', 'more')
    )
    assert first == second
    assert third.rows[: len(first.rows)] == first.rows
    assert [row.split for row in third.rows[len(first.rows) :]] == ['train'] * 3
    assert len((folder / 'answers.csv').read_text().splitlines()) == 7
    assert (folder / 'model.onnx').exists()
    names = ['fit', 'fit', 'predict', 'fit', 'predict', 'convert']
    assert modules == [f'vit_jax.{name}' for name in names]


def test_command_of_the_guide(folder):
    (folder / 'photos').rename(folder / 'DATA')
    ((_, _, module, *arguments),) = lines_of('docs/how-to/fit.md')
    run(module, arguments)
    page = (ROOT / 'docs/reference/run-files.md').read_text()
    (table,) = re.findall(r'## Files of a fit\n(.*?)\n## ', page, re.DOTALL)
    listed = {
        name for row in documentation.tables(table) for name in re.findall(r'`([^`]+)`', row[0])
    }
    written = {path.name for path in (folder / 'DIR').iterdir() if not path.name.startswith('.')}
    assert written <= listed
