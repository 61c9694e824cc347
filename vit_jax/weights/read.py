"""Reads weights of any layout, which is recognised by the names of the arrays."""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np

from vit_jax.errors import UserError, some
from vit_jax.weights import address, array_files, hub, published, table
from vit_jax.weights import model as model_lib
from vit_jax.weights.layouts import LAYOUTS, detect, own
from vit_jax.weights.model import Weights, flatten
from vit_jax.workdir import record

log = logging.getLogger(__name__)

# Prefixes that all names may have, one after another; arrays without them are not of the model.
# big_vision's models of images and texts have img/; PyTorch's two nest either way.
_PREFIXES = ('opt/target/', 'params/', 'img/', 'module.', '_orig_mod.', 'module.')


def load(
    source: str | os.PathLike,
    fields: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    allow_nonfinite: bool = False,
) -> Weights:
    """Loads a file, a directory with one model, a workdir (`step` of it) or one checkpoint.

    From the Hugging Face hub it loads 'hf:ORGANISATION/NAME' or 'timm:NAME', from the web
    'https://HOST/FILE' and 'gs://BUCKET/FILE' of a public bucket. `fields` are of the model: what
    arrays do not show (num_heads, gelu, layer_norm_epsilon) and the source does not state, or
    states wrongly. Raises UserError if the source does not exist, its layout is unknown,
    or arrays are damaged, missing, not of the model or of another shape than the others imply;
    unless allowed, also for NaN and infinity.
    """
    source = os.fspath(source)
    path = hub.fetch(address.fetch(source))
    if run := record.find(path):
        _refuse(source, fields)
        if None not in (step, run[1]) and step != run[1]:
            raise UserError(
                f'{source} is the checkpoint of step {run[1]}: leave out '
                f'--step={step}, or name the workdir, {run[0]}.'
            )
        loaded = own.from_run(run[0], run[1] if step is None else step)
        try:
            _fit_native(flatten(loaded.params), loaded.model, loaded.num_classes, loaded.preprocess)
            _check_images(loaded)
        except UserError as error:
            path = os.path.join(run[0], record.CONFIG)
            raise UserError(f'{path} and {loaded.source}: {error} Restore the file.') from error
    elif step is not None:
        raise UserError(
            f'{source} is not the workdir of a run, which alone has steps: leave out --step={step}.'
        )
    else:
        loaded = _read(path, source, fields)
    if not allow_nonfinite:
        _check_finite(loaded)
    return loaded


def kind_of(source: str) -> str:
    """'workdir' or 'pretrained' for what `load` probably reads, '' for anything else.

    Files are told by the ends of their names; nothing is read or downloaded.
    """
    if record.find(source):
        return 'workdir'
    has_address = re.match(r'(hf|timm):|(gs|https?)://', source)
    return 'pretrained' if has_address or source.endswith(array_files.WEIGHT_FILES) else ''


def _with_partial_patches(loaded):
    """Other programs drop what is left of an image of 384x384 by patches of 14x14."""
    dropping = dataclasses.replace(loaded, model=loaded.model | {'partial_patches': 'drop'})
    stated = dropping.stated_grid()
    return (
        dropping
        if stated and not loaded.stated_grid() and (dropping.grid() in (None, stated))
        else loaded
    )


def _check_finite(loaded):
    """Raises UserError, with counts by array, for values that float32 does not have as numbers."""
    found = []
    for name, x in flatten(loaded.params).items():
        with np.errstate(over='ignore'):
            bad = x.size - np.count_nonzero(np.isfinite(np.asarray(x, np.float32)))
        found += [f'{bad:,} of {x.size:,} in {name}'] * bool(bad)
    if found:
        raise UserError(
            f'{loaded.source} has values that are not finite: {some(found, 4)}. Its '
            'training diverged, or the file is damaged: take an earlier checkpoint, '
            'or copy or download it again. To go on with them, evaluate, '
            'predict and convert have --allow-nonfinite.'
        )


def _read(path, source, fields):
    contents = array_files.read_path(path)
    arrays = contents.arrays
    for prefix in _PREFIXES:
        arrays = {
            name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)
        } or arrays
    layout = detect(arrays, path)
    try:
        return _build(contents._replace(arrays=arrays), layout, source, fields or {})
    except UserError as error:
        raise UserError(f'{source} (layout {layout}): {error}') from error


def _refuse(source, fields):
    if fields:
        raise UserError(
            f'{source} states all fields of its model: {", ".join(fields)} cannot be given.'
        )


def _build(contents, name, source, fields):
    layout = LAYOUTS[name]
    reading = layout.read(contents)
    if layout.native:
        _refuse(source, fields)
        model, num_classes = reading.fields, reading.num_classes
        flat = _fit_native(reading.arrays, model, num_classes, reading.preprocess)
    else:
        found, unknown = table.translate(reading.arrays, reading.table)
        parameters = table.parameters(found)
        model, num_classes = model_lib.describe(parameters, {**reading.fields, **fields})
        templates = model_lib.templates(model, num_classes, parameters, reading.preprocess)
        single = table.fit(found, unknown, table.unstack(templates), layout.table(model))
        flat = table.stack(single, templates)
        if unknown := _unknown(parameters, model, num_classes, reading, fields):
            log.warning(
                '%s does not say %s of its model, which arrays do not show, and no '
                'published model has its sizes: %s is taken. For other values add --model '
                'FIELD=VALUE; for training, to vit_jax.convert.',
                source,
                ' and '.join(unknown),
                ', '.join(f'{field}={model[field]}' for field in unknown),
            )
    if reading.doubt and 'gelu' not in fields:
        log.warning('%s %s', source, reading.doubt)
    classes = reading.classes
    if classes is not None and len(classes) != num_classes:
        log.warning(
            '%s names %d classes and its head has %d: the names are left out',
            source,
            len(classes),
            num_classes,
        )
        classes = None
    params = flax.traverse_util.unflatten_dict(flat, sep='/')
    loaded = _with_partial_patches(
        _with_preprocess(
            Weights(
                params, model, num_classes, classes, reading.preprocess, name, source, reading.loss
            ),
            layout,
        )
    )
    _check_images(loaded)
    return loaded


def _fit_native(arrays, model, num_classes, preprocess):
    """Arrays with our names and shapes; UserError unless they are those of the model."""
    templates = model_lib.templates(model, num_classes, arrays, preprocess)
    found = [(table.Entry((name,), name), x) for name, x in arrays.items()]
    return table.fit(found, [], templates, ())


def _check_images(loaded):
    """Raises UserError unless means and deviations are for the channels of the images."""
    for field in ('mean', 'std'):
        numbers = (loaded.preprocess or {}).get(field)
        if numbers and len(numbers) not in (3, loaded.channels()):
            raise UserError(
                f'{field} of its images is {numbers}: expected a number for each of '
                f'{loaded.channels()} channels.'
            )


def _with_preprocess(loaded, layout):
    """If nothing is stated, takes what the program or model surely uses, and says so."""
    if loaded.preprocess or not (usual := layout.usual_preprocess(loaded)):
        return loaded
    reason, preprocess = usual
    log.info(
        '%s does not say how images are prepared, and %s: %s. To prepare them '
        'otherwise, add --preprocess FIELD=VALUE or, in training, set the preprocess fields '
        'of the config.',
        loaded.source,
        reason,
        published.words(preprocess),
    )
    return dataclasses.replace(loaded, preprocess=preprocess)


def _unknown(parameters, model, num_classes, reading, given):
    """Fields that are a guess: neither stated nor shown, and the sizes are of no released model."""
    query = parameters.get('blocks/0/attention/query/kernel')
    if query is None or query.ndim > 2 or model_lib.heads_are_published(model, num_classes):
        return []
    heads = [] if 'num_heads' in reading.fields else ['num_heads']
    return [field for field in [*heads, *reading.assumed] if field not in given]
