"""Writes the folder: the page, the model, a record about it for the page, and the runtime."""

import importlib.resources
import os
import pathlib
from typing import Any

import jax

from vit_jax import reporting
from vit_jax.data import resizing
from vit_jax.errors import UserError
from vit_jax.files import write_json
from vit_jax.web import runtime
from vit_jax.weights import Weights, array_files, description, export
from vit_jax.workdir import record

HERE = pathlib.Path(__file__).parent
MODEL = 'model.onnx'
RECORD = 'model.json'
STYLE = 'page.css'
FILES = ('index.html', 'page.js', STYLE, RECORD, MODEL, *runtime.FILES)


def save(weights: Weights, path: str, archive: str | None = None) -> None:
    """Writes the folder at `path`; `archive` is the runtime's package, see runtime.read.

    Raises UserError for a model that has no classes, does not take RGB images or is too large for a
    browser, and where export.save and runtime.read do.
    """
    _check_model(weights)
    weights = description.completed(weights)
    page_record = about(weights)
    runtime_files = runtime.read(archive)  # first, because it may be missing
    with array_files.replacing(path, FILES) as temporary:
        folder = pathlib.Path(temporary)
        folder.mkdir()
        export.save(weights, str(folder / MODEL), 'onnx')
        for name in ('index.html', 'page.js'):
            (folder / name).write_bytes((HERE / name).read_bytes())
        style = importlib.resources.files(reporting).joinpath('report.css').read_text()
        (folder / STYLE).write_text(style + (HERE / STYLE).read_text())
        page_record['bytes'] = (folder / MODEL).stat().st_size
        write_json(str(folder / RECORD), page_record)
        for name, content in runtime_files.items():
            (folder / name).write_bytes(content)


def _check_model(weights):
    """Raises UserError for a model that the page cannot use."""
    description.check_rgb(weights)
    if not weights.num_classes:
        raise UserError(
            f'{weights.source} has no head and therefore no classes that a page could '
            'show: fine-tune first (configs/finetune.py).',
            kind='inapplicable',
            field='num_classes',
            file=weights.source,
        )
    size = sum(x.nbytes for x in jax.tree.leaves(weights.params))
    if size > export.LARGEST_FILE:
        raise UserError(
            f'{weights.source} has parameters of {size / 1e9:.1f} GB, and a browser '
            f'reads models up to {export.LARGEST_FILE / 1e9:.1f} GB: add '
            '--dtype=bfloat16, or choose a smaller model.',
            kind='inapplicable',
            file=weights.source,
            value=size,
        )


def about(weights: Weights) -> dict[str, Any]:
    """The record for the page: the preparation of photos, the names of the classes, the loss."""
    preprocess = description.complete_preprocess(weights)
    image_size = weights.image_size()
    preparation = ('fit', 'resize', 'antialias', 'uint8_resize', 'mean', 'std')
    return {
        'name': _name(weights.source),
        'image_size': image_size,
        'target_size': resizing.target_size(image_size, preprocess),
        'classes': description.class_names(weights),
        'loss': weights.loss or 'softmax',
        **{name: preprocess[name] for name in preparation},
    }


def _name(source):
    """The name of the file, or of the run with the step of the checkpoint."""
    workdir, step = record.find(source) or (source, None)
    name = os.path.basename(workdir.rstrip('/'))
    if step is None:
        return name
    return f'{name}, step {step:,}'
