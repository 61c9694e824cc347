"""Writes weights in any layout that can hold their model, and says why others cannot."""

import dataclasses
import os

from vit_jax.errors import UserError, check_choice
from vit_jax.weights import array_files, description, table
from vit_jax.weights.layouts import LAYOUTS
from vit_jax.weights.model import Weights, flatten
from vit_jax.workdir.record import write_json

# Fields that decide how arrays are used, but not which arrays there are.
_INEXACT = (
    'gelu',
    'layer_norm_epsilon',
    'resnet.group_norm_epsilon',
    'resnet.weight_epsilon',
    'resnet.weight_epsilon_on',
)


def save(weights: Weights, path: str | os.PathLike, layout: str) -> None:
    """Writes weights; a directory for Hugging Face, and for timm unless `path` names a file.

    A file or directory of weights at `path` is replaced once the new one is complete. What the
    weights do not say of images is said in a directory as it is used here, with a warning.
    Raises UserError if the layout cannot hold this model (see `misfits`), its files have another
    ending, `path` is a directory with anything but weights, or a .pth file needs PyTorch.
    """
    check_choice('layout', layout, LAYOUTS)
    path, value = os.fspath(path), LAYOUTS[layout]
    suffix = '' if array_files.is_directory(path) else os.path.splitext(path)[1]
    if suffix not in value.suffixes:
        endings = [s for s in value.suffixes if s]
        expected = ' or '.join(
            ['a directory, without such an ending'] * ('' in value.suffixes)
            + [f'a name ending in {", ".join(endings)}'] * bool(endings)
        )
        raise UserError(f'{path!r} cannot hold layout {layout}: expected {expected}.')
    if lines := misfits(weights, path, layout):
        raise UserError(f'layout {layout} cannot hold this model:\n  ' + '\n  '.join(lines))
    if not suffix:  # a program that reads it has defaults of its own
        weights = dataclasses.replace(
            weights,
            preprocess={
                'image_size': weights.image_size(),
                **description.complete_preprocess(weights),
            },
        )
    arrays = flatten(weights.params)
    if not value.native:
        arrays = table.to_theirs(table.unstack(arrays), value.table(weights.model))
    arrays, metadata = value.finish(arrays, weights), value.metadata(weights)
    with array_files.replacing(path) as temporary:
        if suffix:
            array_files.write(temporary, arrays, suffix, metadata)
        else:
            os.makedirs(temporary)
            for name, content in value.sidecars(weights).items():
                write_json(os.path.join(temporary, name), content)
            array_files.write(f'{temporary}/model.safetensors', arrays, '.safetensors', metadata)


def misfits(weights: Weights, path: str, layout: str) -> list[str]:
    """Why a layout cannot hold this model, one line per reason."""
    value = LAYOUTS[layout]
    lines = [line for _, line in _differences(weights.model, path, value).values()]
    return lines or value.refusals(weights, path)


def approximate(weights: Weights, path: str, layout: str) -> tuple[Weights, list[str]]:
    """The weights with the formulas of the layout, and one line for each that differs.

    Only GELU's formula and epsilons are changed: logits change by some thousandths of their size.
    """
    model, lines = dict(weights.model), []
    for name, (allowed, line) in _differences(model, path, LAYOUTS[layout]).items():
        if name in _INEXACT:
            lines.append(line)
            if name.startswith('resnet.'):
                model['resnet'] = model['resnet'] | {name.removeprefix('resnet.'): allowed[0]}
            else:
                model[name] = allowed[0]
    return dataclasses.replace(weights, model=model), lines


def _differences(model, path, layout):
    """{field: (allowed values, message)} of the fields whose value the layout does not allow."""
    values = model | {f'resnet.{name}': value for name, value in (model['resnet'] or {}).items()}
    return {
        name: (
            allowed,
            f'model.{name} is {values[name]!r}, there it is ' + ' or '.join(map(repr, allowed)),
        )
        for name, allowed in layout.allowed_values(model, path).items()
        if name in values and values[name] not in allowed
    }
