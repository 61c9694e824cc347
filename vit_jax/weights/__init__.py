"""Released weights in, results out: parameters from and to the layouts of other programs.

    from vit_jax import weights
    w = weights.load('hf:google/vit-base-patch16-224')
    model = models.build(w.model, w.num_classes)
    weights.save(w, 'b16.npz', 'google')
"""

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping

import flax.traverse_util
import numpy as np

from vit_jax.errors import UserError, check_choice
from vit_jax.weights import files, hub
from vit_jax.weights import model as model_lib
from vit_jax.weights import table as table_lib
from vit_jax.weights.layouts import big_vision, google, huggingface, own, timm, torchvision
from vit_jax.weights.model import Weights

log = logging.getLogger(__name__)

# In the order in which they are looked for.
LAYOUTS = {'vit_jax': own, 'google': google, 'big_vision': big_vision, 'timm': timm,
           'huggingface': huggingface, 'torchvision': torchvision}
# What may stand before every name, one after another; everything else in such a file is not the
# model. big_vision's models of images and texts have img/; PyTorch's two nest either way.
_PREFIXES = ('opt/target/', 'params/', 'img/', 'module.', '_orig_mod.', 'module.')
# What decides how the arrays are used but not which there are.
_INEXACT = ('gelu', 'layer_norm_epsilon', 'resnet.group_norm_epsilon', 'resnet.weight_epsilon',
            'resnet.weight_epsilon_on')


def load(source: str) -> Weights:
    """Loads weights of any layout; which one is seen from the names of the arrays.

    timm and torchvision do not store the number of heads: without a config.json that has it, it is
    that of the published model of this size, otherwise one head per 64 features.

    Args:
      source: a file, a directory with one model, a workdir or one of its checkpoints,
        'hf:ORGANISATION/NAME' or 'timm:NAME' from the Hugging Face hub.

    Raises:
      UserError: nothing is there, the layout is unknown, or arrays are damaged, missing, left over
        or of another shape than the others imply.
    """
    path = hub.fetch(source)
    if workdir := own.find_workdir(path):
        return own.load_workdir(*workdir)
    arrays, metadata, sidecars = files.read_path(path)
    arrays = _strip_prefix(arrays)
    layout = detect(arrays, path)
    try:
        return _build(arrays, metadata, sidecars, layout, source)
    except UserError as error:
        raise UserError(f'{source} (layout {layout}): {error}') from error


def detect(names: Mapping[str, np.ndarray], source: str) -> str:
    """The key of LAYOUTS that has such names; raises UserError when none has."""
    for layout, module in LAYOUTS.items():
        if any(re.fullmatch(module.MARK, name) for name in names):
            return layout
    raise UserError(
        f'{source} is of an unknown layout. It has {len(names)} arrays, among them '
        f'{", ".join(list(names)[:6])}. Known are {", ".join(LAYOUTS)}, by names such as '
        'Transformer/encoderblock_0/LayerNorm_0/scale, patch_embed.proj.weight, '
        'vit.embeddings.patch_embeddings.projection.weight and conv_proj.weight.')


def _build(arrays, metadata, sidecars, layout, source):
    if layout == 'vit_jax':
        given = own.load_file(metadata, source)
        found = [table_lib.Found((name,), name, 'same', x) for name, x in arrays.items()]
        shapes = model_lib.shapes(given['model'], given['num_classes'], arrays, given['preprocess'])
        flat = table_lib.fit(found, [], shapes, [])
        return Weights(_nest(flat), **given, layout=layout, source=source)
    module = LAYOUTS[layout]
    fields, classes, preprocess = module.known(arrays, sidecars)
    arrays, table = module.prepare(arrays, sidecars)
    found, unknown = table_lib.translate(arrays, table)
    single = table_lib.parts(found)
    model, num_classes = model_lib.describe(single, fields)
    shapes = model_lib.shapes(model, num_classes, single, preprocess)
    shapes = {name: x.shape for name, x in table_lib.unstack(
        {name: np.empty(shape, np.int8) for name, shape in shapes.items()}).items()}
    flat = table_lib.fit(found, unknown, shapes, module.table(model))
    if classes is not None and len(classes) != num_classes:
        log.warning('%s names %d classes and its head has %d: the names are left out', source,
                    len(classes), num_classes)
        classes = None
    return Weights(_nest(table_lib.stack(flat)), model, num_classes, classes, preprocess, layout,
                   source)


def save(weights: Weights, path: str, layout: str) -> None:
    """Writes weights; a directory for Hugging Face, and for timm unless `path` names a file.

    The layout must hold the model: see `misfits`. A file or directory of weights at `path` is
    replaced once the new one is complete.

    Args:
      layout: a key of LAYOUTS.

    Raises:
      UserError: the layout cannot hold this model, its files have another ending, or `path` is a
        directory with anything but weights.
    """
    check_choice('layout', layout, tuple(LAYOUTS))
    module = LAYOUTS[layout]
    kind = '' if files.is_directory(path) else os.path.splitext(path)[1]
    if kind not in module.SUFFIXES:
        endings = [s for s in module.SUFFIXES if s]
        expected = ' or '.join(['a directory, without such an ending'] * ('' in module.SUFFIXES)
                               + [f'a name ending in {", ".join(endings)}'] * bool(endings))
        raise UserError(f'{path!r} cannot hold layout {layout}: expected {expected}.')
    files.check_replaceable(path)
    if lines := misfits(weights, path, layout):
        raise UserError(f'layout {layout} cannot hold this model:\n  ' + '\n  '.join(lines))
    flat, sidecars, metadata = model_lib.flatten(weights.params), {}, {'format': 'pt'}
    if layout == 'vit_jax':
        metadata = own.metadata(weights)
    else:
        flat = table_lib.to_theirs(table_lib.unstack(flat), module.table(weights.model))
        flat, sidecars = module.finish(flat, weights)
    temporary = f'{path.rstrip("/")}.writing-{os.getpid()}'
    try:
        if kind:
            files.write(temporary, flat, kind, metadata)
        else:
            os.makedirs(temporary)
            for name, make in sidecars.items():
                with open(os.path.join(temporary, name), 'w', encoding='utf-8') as file:
                    json.dump(make(), file, indent=2)
                    file.write('\n')
            files.write(os.path.join(temporary, 'model.safetensors'), flat, '.safetensors',
                        metadata)
        _replace(temporary, path)
    finally:
        _remove(temporary)


def misfits(weights: Weights, path: str, layout: str) -> list[str]:
    """What keeps a layout from holding this model, one line per field."""
    lines = _describe(_misfits(weights.model, path, layout))
    if layout == 'timm' and timm.is_ambiguous(weights, path):
        rows, columns = weights.grid()
        lines.append(f'a file would be read as a square of patches without a class token, which '
                     f'has as many positions as {rows}x{columns} with one: name a directory')
    return lines


def approximate(weights: Weights, path: str, layout: str) -> tuple[Weights, list[str]]:
    """The model that the layout can hold with the same arrays, and what that changes.

    Only GELU's formula and epsilons are changed: logits change by some thousandths of their size.
    """
    changes = {name: x for name, x in _misfits(weights.model, path, layout).items()
               if name in _INEXACT}
    model = dict(weights.model)
    for name, (_, allowed) in changes.items():
        if name.startswith('resnet.'):
            model['resnet'] = model['resnet'] | {name.removeprefix('resnet.'): allowed[0]}
        else:
            model[name] = allowed[0]
    return dataclasses.replace(weights, model=model), _describe(changes)


def _describe(wrong):
    return [f'model.{name} is {value!r}, there it is {" or ".join(map(repr, allowed))}'
            for name, (value, allowed) in wrong.items()]


def _misfits(model, path, layout):
    """{field: (value, values that the layout can hold)} of those that do not fit."""
    if layout == 'vit_jax':
        return {}
    if 'hidden_size' not in model and layout not in ('google', 'timm'):
        return {'resnet': ('a ResNet alone', ('a part of a transformer',))}
    allowed = {'attention': ('full',), 'position_at': ('stem',)} if 'hidden_size' in model else {}
    wrong = {}
    for name, values in (allowed | LAYOUTS[layout].holds(model, path)).items():
        field = name.removeprefix('resnet.')
        value = model['resnet'][field] if field != name else model[name]
        if value not in values:
            wrong[name] = (value, values)
    return wrong


def _strip_prefix(arrays):
    for prefix in _PREFIXES:
        inside = {name.removeprefix(prefix): x for name, x in arrays.items()
                  if name.startswith(prefix)}
        arrays = inside or arrays
    return arrays


def _nest(flat):
    return flax.traverse_util.unflatten_dict(flat, sep='/')


def _replace(temporary, path):
    """Puts what is complete in its place; a directory cannot replace another in one step."""
    if os.path.isdir(path):
        _remove(path)
    os.replace(temporary, path.rstrip('/'))


def _remove(path):
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)
