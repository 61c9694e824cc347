"""The notebooks: their first cells, their imports, and that each runs in a new kernel."""

import ast
import dataclasses
import importlib
import json
import os
import re

import pytest

from tests.support import interop, small
from tests.support.datasets import write_images
from tests.support.runs import ROOT, environment
from vit_jax import weights
from vit_jax.workdir import record

NOTEBOOKS = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / 'notebooks').glob('*.ipynb'))
}
every_notebook = pytest.mark.parametrize('name', NOTEBOOKS)


def code_cells(name):
    return [cell for cell in NOTEBOOKS[name]['cells'] if cell['cell_type'] == 'code']


def source(cell):
    return ''.join(cell['source'])


def settings(name):
    """Returns the cells with the tag that papermill uses for settings."""
    return [cell for cell in code_cells(name) if 'parameters' in cell['metadata'].get('tags', ())]


def test_all_notebooks_exist():
    assert list(NOTEBOOKS) == ['fine_tune', 'predict_and_look', 'step_by_step', 'train_and_inspect']


@every_notebook
def test_notebook_is_valid_and_has_no_outputs(name):
    nbformat = interop.require('nbformat')
    nbformat.validate(NOTEBOOKS[name])
    assert NOTEBOOKS[name]['metadata']['kernelspec']['name'] == 'python3'
    for cell in code_cells(name):
        assert (cell['outputs'], cell['execution_count']) == ([], None)


@every_notebook
def test_notebook_starts_with_purpose_time_installation_and_settings(name):
    first, second = NOTEBOOKS[name]['cells'][:2]
    assert first['cell_type'] == 'markdown'
    assert re.match(r'# .+\n\n\*\*What you learn\.\*\* .+\n', source(first))
    assert '\n\n**How long it takes.** ' in source(first)
    assert second['cell_type'] == 'code'
    assert source(second) == source(code_cells('fine_tune')[0])
    assert settings(name) == [code_cells(name)[1]]


@every_notebook
def test_notebook_imports_existing_public_names(name):
    for cell in code_cells(name):
        for node in ast.walk(ast.parse(source(cell))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for full in imported(node):
                    assert not re.search(r'(^|\.)_', full), full
                    if full.startswith('vit_jax'):
                        find(full)


def imported(node):
    module = f'{node.module}.' if isinstance(node, ast.ImportFrom) else ''
    return [f'{module}{alias.name}' for alias in node.names]


def find(full):
    """Returns the module, or the attribute of a module, of a full name."""
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError:
        module, _, last = full.rpartition('.')
        return getattr(importlib.import_module(module), last)


def test_first_cell_installs_missing_packages_only(monkeypatch, tmp_path):
    """Without the package the cell installs the clone or SOURCE, or raises an error."""
    calls = []
    monkeypatch.setattr('subprocess.run', lambda command, check: calls.append(command[4:]))
    code = source(code_cells('fine_tune')[0])
    exec(code, {})
    assert not calls
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    monkeypatch.setattr('shutil.which', lambda name: None)
    monkeypatch.chdir(ROOT / 'notebooks')
    exec(code, {})
    exec(code.replace("SOURCE = ''", "SOURCE = 'git+https://x/y/z'"), {})
    assert calls == [
        ['--quiet', '-e', f'{ROOT}[train]'],
        ['--quiet', 'vit_jax[train] @ git+https://x/y/z'],
    ]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match='write its Git address in SOURCE'):
        exec(code, {})


@pytest.fixture
def execute(tmp_path):
    """Runs a notebook in a new kernel in tmp_path, without network: (name, settings) -> text.

    The settings are in a cell after the settings of the notebook, as with papermill. The text is
    the output of the cells; each cell that draws has a picture.
    """
    nbformat, nbclient = interop.require('nbformat'), interop.require('nbclient')
    interop.require('ipykernel')

    def run(name, pictures, **values):
        notebook = nbformat.read(ROOT / f'notebooks/{name}.ipynb', as_version=4)
        place = 1 + next(
            k
            for k, cell in enumerate(notebook.cells)
            if 'parameters' in cell.metadata.get('tags', ())
        )
        lines = [f'{key} = {value!r}' for key, value in values.items()]
        notebook.cells.insert(place, nbformat.v4.new_code_cell('\n'.join(lines)))
        nbclient.NotebookClient(notebook, timeout=500, kernel_name='python3').execute(
            cwd=str(tmp_path),
            env=environment()
            | {
                'PYTHONPATH': str(ROOT),
                'HF_HUB_OFFLINE': '1',
                'MPLBACKEND': 'module://matplotlib_inline.backend_inline',
                'HTTPS_PROXY': 'http://127.0.0.1:9',
                'HTTP_PROXY': 'http://127.0.0.1:9',
                'PYTHONWARNINGS': '',
                'IPYTHONDIR': str(tmp_path / 'ipython'),
            },
        )
        outputs = [
            output for cell in notebook.cells if cell.cell_type == 'code' for output in cell.outputs
        ]
        assert sum('image/png' in output.get('data', ()) for output in outputs) == pictures
        return ''.join(output.text for output in outputs if output.get('name') == 'stdout')

    return run


def small_weights(path, **change):
    """Writes a random ViT with the preprocessing of released models."""
    given = small.make('vit', num_heads=4, **change)
    weights.save(
        dataclasses.replace(
            given, preprocess=given.preprocess | {'mean': (0.5,) * 3, 'std': (0.5,) * 3}
        ),
        str(path),
        'vit_jax',
    )
    return str(path)


@pytest.mark.slow
def test_predict_and_look(tmp_path, execute):
    text = execute('predict_and_look', 5, WEIGHTS=small_weights(tmp_path / 'x.safetensors'), TOP=2)
    assert 'images of 16x16 pixels are 2x2 patches' in text
    assert len(re.findall(r'^ +[\d.]+%  \w+$', text, re.M)) == 2 * 2
    assert float(re.search(r'model itself: (\S+)', text)[1]) < 1e-5


@pytest.mark.nightly
@pytest.mark.slow
def test_step_by_step(execute):
    """All comparisons hold. Without positions, the order of tokens does not matter."""
    text = execute('step_by_step', 3, SEED=1)
    differences = re.findall(r'^(.+): largest value (\S+), largest difference (\S+)$', text, re.M)
    assert [name for name, *_ in differences] == [
        'patches times E, and a convolution',
        'z0, the input of the first layer',
        'attention weights of the first layer',
        'output of the first layer',
        'layer 0',
        'layer 1',
        'layer 2',
        'y, the representation of the image',
        'logits',
    ]
    assert all(
        float(difference) < 1e-5 * max(1, float(largest)) for _, largest, difference in differences
    )
    without, with_positions = map(float, re.findall(r'changes logits by (\S+)', text))
    assert without < 1e-5 < 1e-3 < with_positions


@pytest.mark.slow
def test_fine_tune(tmp_path, execute):
    """A folder with splits, in which colours distinguish the classes."""
    for split, count in (('train', 16), ('test', 4)):
        write_images(tmp_path / 'mine' / split, ['ant', 'bee', 'cat'], count)
    text = execute(
        'fine_tune',
        5,
        DATA=str(tmp_path / 'mine'),
        STEPS=8,
        BATCH_SIZE=16,
        WEIGHTS=small_weights(tmp_path / 'x.safetensors'),
        IMAGE_SIZE=16,
    )
    assert '48 images of 3 classes: ant, bee, cat' in text
    assert 'finished' in text
    assert re.search(r'[\d.]+% of 12 images are right', text)
    assert os.path.exists(tmp_path / 'runs/fine_tuned/for_timm/config.json')
    assert record.read(str(tmp_path / 'runs/fine_tuned'))[0]['augment']['flip']


@pytest.mark.nightly
def test_fine_tune_without_a_folder_or_splits(tmp_path, execute):
    """The notebook writes digits, twice, or reads a folder without splits."""
    given = dict(
        STEPS=4, BATCH_SIZE=16, IMAGE_SIZE=16, WEIGHTS=small_weights(tmp_path / 'x.safetensors')
    )
    for _ in range(2):  # the second run, in a new kernel, is already complete
        assert '300 images of 10 classes: digit 0' in execute('fine_tune', 5, **given)
    assert not record.read(str(tmp_path / 'runs/fine_tuned'))[0]['augment']['flip']
    write_images(tmp_path / 'mine', ['ant', 'bee', 'cat'], 20)
    text = execute('fine_tune', 5, DATA=str(tmp_path / 'mine'), WORKDIR='other', **given)
    assert '% of 60 images are right' in text
    for split, number in (('train', 60), ('val', 12)):  # train alone, and train with val
        write_images(tmp_path / 'split' / split, ['ant', 'bee', 'cat'], number // 3)
        text = execute('fine_tune', 5, DATA=str(tmp_path / 'split'), WORKDIR=split, **given)
        assert f'% of {number} images are right' in text


@pytest.mark.nightly
@pytest.mark.slow
def test_train_and_inspect(execute):
    text = execute('train_and_inspect', 9, STEPS=8, BATCH_SIZE=32, LAYERS=2, WIDTH=16, HEADS=2)
    assert 'finished' in text
    of_run = re.search(r'([\d.]+%) of the held-out digits at step 8', text)[1]
    assert re.search(r'([\d.]+%) of 360 digits are right', text)[1] == of_run
