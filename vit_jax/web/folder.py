"""Writes the folder: page, model, what the page must know of it, and the runtime."""

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
MODEL, RECORD, STYLE = 'model.onnx', 'model.json', 'page.css'
FILES = ('index.html', 'page.js', STYLE, RECORD, MODEL, *runtime.FILES)


def save(weights: Weights, path: str, archive: str | None = None) -> None:
    """Writes the folder at `path`; `archive` is the runtime's package, see runtime.read.

    Raises UserError for a model without classes, of other images than RGB or too large for a
    browser, and as export.save and runtime.read do.
    """
    description.check_rgb(weights)
    if not weights.num_classes:
        raise UserError(
            f'{weights.source} has no head and therefore no classes that a page could '
            'show: fine-tune first (configs/finetune.py).'
        )
    size = sum(x.nbytes for x in jax.tree.leaves(weights.params))
    if size > export.LARGEST_FILE:
        raise UserError(
            f'{weights.source} has parameters of {size / 1e9:.1f} GB, and a browser '
            f'reads models up to {export.LARGEST_FILE / 1e9:.1f} GB: add '
            '--dtype=bfloat16, or take a smaller model.'
        )
    weights = description.completed(weights)
    said = about(weights)
    parts = runtime.read(archive)  # first, because it may be missing
    with array_files.replacing(path, FILES) as temporary:
        folder = pathlib.Path(temporary)
        folder.mkdir()
        export.save(weights, str(folder / MODEL), 'onnx')
        for name in ('index.html', 'page.js'):
            (folder / name).write_bytes((HERE / name).read_bytes())
        style = importlib.resources.files(reporting).joinpath('report.css').read_text()
        (folder / STYLE).write_text(style + (HERE / STYLE).read_text())
        write_json(str(folder / RECORD), said | {'bytes': (folder / MODEL).stat().st_size})
        for name, content in parts.items():
            (folder / name).write_bytes(content)


def about(weights: Weights) -> dict[str, Any]:
    """What the page must know: how photos are prepared, and what the classes are called."""
    preprocess = description.complete_preprocess(weights)
    size = weights.image_size()
    workdir, step = record.find(weights.source) or (weights.source, None)
    name = os.path.basename(workdir.rstrip('/'))
    return {
        'name': name if step is None else f'{name}, step {step:,}',
        'image_size': size,
        'target_size': resizing.target_size(size, preprocess),
        'classes': description.class_names(weights),
        'loss': weights.loss or 'softmax',
        **{
            name: preprocess[name]
            for name in ('fit', 'resize', 'antialias', 'uint8_resize', 'mean', 'std')
        },
    }
