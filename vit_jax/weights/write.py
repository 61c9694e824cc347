"""Writes weights in any layout that can store their model, and says why others cannot."""

import dataclasses
import os
from collections.abc import Mapping

from vit_jax.errors import UserError, check_choice
from vit_jax.files import write_text
from vit_jax.weights import array_files, description, table
from vit_jax.weights.layouts import LAYOUTS
from vit_jax.weights.model import Weights, flatten
from vit_jax.workdir.record import write_json

# Fields that change how arrays are used, but not which arrays exist.
_INEXACT = (
    'gelu',
    'layer_norm_epsilon',
    'resnet.group_norm_epsilon',
    'resnet.weight_epsilon',
    'resnet.weight_epsilon_on',
)


def save(
    weights: Weights,
    path: str | os.PathLike,
    layout: str,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Writes weights to a file or, for Hugging Face and optionally for timm, to a directory.

    Existing weights at `path` are replaced once the new file or directory is complete. A directory
    states the complete preparation of images. A warning lists the defaults that replace missing
    values.

    Args:
      weights: the weights.
      path: a file with an ending of the layout, or a directory.
      layout: a key of LAYOUTS.
      texts: further text files of a directory, by name.

    Raises:
      UserError: the layout cannot store this model (see `misfits`), its files have another ending,
        `path` is a directory with other files than weights, or a .pth file needs PyTorch.
    """
    check_choice('layout', layout, LAYOUTS)
    path = os.fspath(path)
    suffix = '' if array_files.is_directory(path) else os.path.splitext(path)[1]
    if suffix not in LAYOUTS[layout].suffixes:
        raise _suffix_error(path, layout)
    reasons = misfits(weights, path, layout)
    if reasons:
        raise UserError(
            f'layout {layout} cannot store this model:\n  ' + '\n  '.join(reasons),
            kind='inapplicable',
            field='layout',
            file=path,
            value=layout,
        )
    if suffix:
        _write_file(weights, path, layout, suffix)
    else:
        _write_directory(weights, path, layout, texts or {})


def _suffix_error(path, layout):
    suffixes = LAYOUTS[layout].suffixes
    expected = []
    if '' in suffixes:
        expected.append('a directory, without such an ending')
    endings = [suffix for suffix in suffixes if suffix]
    if endings:
        expected.append(f'a name ending in {", ".join(endings)}')
    return UserError(
        f'{path!r} cannot be in layout {layout}: expected {" or ".join(expected)}.',
        kind='value',
        file=path,
        value=path,
    )


def _write_file(weights, path, layout, suffix):
    arrays = _arrays(weights, layout)
    metadata = LAYOUTS[layout].metadata(weights)
    with array_files.replacing(path) as temporary:
        array_files.write(temporary, arrays, suffix, metadata)


def _write_directory(weights, path, layout, texts):
    # The program that reads it has other defaults for the preparation of images.
    preprocess = {
        'image_size': weights.image_size(),
        **description.complete_preprocess(weights),
    }
    weights = dataclasses.replace(weights, preprocess=preprocess)
    arrays = _arrays(weights, layout)
    metadata = LAYOUTS[layout].metadata(weights)
    with array_files.replacing(path, (*array_files.WRITTEN, *texts)) as temporary:
        os.makedirs(temporary)
        for name, text in texts.items():
            write_text(os.path.join(temporary, name), text)
        for name, content in LAYOUTS[layout].sidecars(weights).items():
            write_json(os.path.join(temporary, name), content)
        array_files.write(f'{temporary}/model.safetensors', arrays, '.safetensors', metadata)


def _arrays(weights, layout):
    """The arrays of the file by their names in the layout."""
    value = LAYOUTS[layout]
    arrays = flatten(weights.params)
    if not value.native:
        arrays = table.to_theirs(table.unstack(arrays), value.table(weights.model))
    return value.finish(arrays, weights)


def misfits(weights: Weights, path: str, layout: str) -> list[str]:
    """Why a layout cannot store this model, one line per reason."""
    value = LAYOUTS[layout]
    lines = [line for _, line in _differences(weights.model, path, value).values()]
    return lines or value.refusals(weights, path)


def approximate(weights: Weights, path: str, layout: str) -> tuple[Weights, list[str]]:
    """The weights with the formulas of the layout, and one line for each changed formula.

    Only the formula of GELU and epsilons change. Logits change by some thousandths of their size.
    """
    model = dict(weights.model)
    lines = []
    for name, (allowed, line) in _differences(model, path, LAYOUTS[layout]).items():
        if name not in _INEXACT:
            continue
        lines.append(line)
        if name.startswith('resnet.'):
            model['resnet'] = model['resnet'] | {name.removeprefix('resnet.'): allowed[0]}
        else:
            model[name] = allowed[0]
    return dataclasses.replace(weights, model=model), lines


def _differences(model, path, layout):
    """{field: (allowed values, message)} of the fields whose value the layout does not allow."""
    values = dict(model)
    for name, value in (model['resnet'] or {}).items():
        values[f'resnet.{name}'] = value
    differences = {}
    for name, allowed in layout.allowed_values(model, path).items():
        if name in values and values[name] not in allowed:
            expected = ' or '.join(map(repr, allowed))
            line = f'model.{name} is {values[name]!r}: the layout requires {expected}'
            differences[name] = (allowed, line)
    return differences
