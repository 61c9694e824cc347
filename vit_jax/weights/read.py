"""Reads weights of any layout; the names of the arrays show the layout."""

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

# Prefixes that the names of a model's arrays may have, in this order. If some arrays have a prefix,
# arrays without it are not part of the model. big_vision's models of images and texts have img/.
# PyTorch's module. (data parallelism) may be inside or outside of _orig_mod. (compilation).
_PREFIXES = ('opt/target/', 'params/', 'img/', 'module.', '_orig_mod.', 'module.')


def load(
    source: str | os.PathLike,
    fields: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    allow_nonfinite: bool = False,
) -> Weights:
    """Loads weights from a file, directory, run, address or name on the Hugging Face hub.

    Args:
      source: a file, a directory with one model, a workdir or one of its checkpoints;
        'hf:ORGANISATION/NAME' or 'timm:NAME' on the Hugging Face hub; 'https://HOST/FILE', or
        'gs://BUCKET/FILE' in a public bucket.
      fields: fields of the model that arrays do not show (num_heads, gelu, layer_norm_epsilon), if
        the source does not state them or states them wrongly.
      step: the step of a checkpoint in a workdir; see saved_params.load_params for the default.
      allow_nonfinite: whether parameters may be NaN or infinite.

    Raises:
      UserError: the source does not exist or has an unknown layout; an array is damaged, missing,
        not part of the model, or of another shape than the other arrays imply; or a parameter is
        not finite.
    """
    source = os.fspath(source)
    path = hub.fetch(address.fetch(source))
    run = record.find(path)
    if run:
        _check_no_fields(source, fields)
        loaded = _load_run(source, *run, step)
    elif step is not None:
        raise UserError(
            f'{source} is not the workdir of a run, and only runs have steps: leave out '
            f'--step={step}.',
            kind='inapplicable',
            field='--step',
            file=source,
            value=step,
        )
    else:
        loaded = _load_path(path, source, fields or {})
    if not allow_nonfinite:
        _check_finite(loaded)
    return loaded


def kind_of(source: str) -> str:
    """Returns 'workdir' or 'pretrained' for a source that `load` can probably read, otherwise ''.

    Files are recognised by the endings of their names; nothing is read or downloaded.
    """
    if record.find(source):
        return 'workdir'
    has_address = re.match(r'(hf|timm):|(gs|https?)://', source)
    if has_address or source.endswith(array_files.WEIGHT_FILES):
        return 'pretrained'
    return ''


def _check_no_fields(source, fields):
    if fields:
        raise UserError(
            f'{source} states all fields of its model: leave out {", ".join(fields)}.',
            kind='inapplicable',
            field=next(iter(fields)),
            file=source,
        )


def _load_run(source, workdir, path_step, step):
    """Loads a run; `path_step` is the step if the source is a checkpoint, None for the workdir."""
    if path_step is not None and step not in (None, path_step):
        raise UserError(
            f'{source} is the checkpoint of step {path_step}: leave out '
            f'--step={step}, or name the workdir, {workdir}.',
            kind='value',
            field='--step',
            file=source,
            value=step,
        )
    if path_step is not None:
        step = path_step
    loaded = own.from_run(workdir, step)
    try:
        _fit_native(flatten(loaded.params), loaded.model, loaded.num_classes, loaded.preprocess)
        _check_images(loaded)
    except UserError as error:
        config = os.path.join(workdir, record.CONFIG)
        raise UserError(
            f'{config} and {loaded.source}: {error} Restore the file.',
            kind=error.kind,
            field=error.field,
            file=config,
            value=error.value,
        ) from error
    return loaded


def _load_path(path, source, fields):
    """Loads a file or directory on this machine; `source` is the name that the user gave."""
    contents = array_files.read_path(path)
    arrays = contents.arrays
    for prefix in _PREFIXES:
        arrays = _without_prefix(arrays, prefix)
    layout = detect(arrays, path)
    try:
        return _build(contents._replace(arrays=arrays), layout, source, fields)
    except UserError as error:
        raise UserError(
            f'{source} (layout {layout}): {error}',
            kind=error.kind,
            field=error.field,
            file=source,
            value=error.value,
        ) from error


def _without_prefix(arrays, prefix):
    """The arrays whose names have the prefix, which is removed; all arrays if none has it."""
    matching = {name: x for name, x in arrays.items() if name.startswith(prefix)}
    if not matching:
        return arrays
    return {name.removeprefix(prefix): x for name, x in matching.items()}


def _build(contents, layout_name, source, fields):
    """Makes weights from the contents of a file, with all values that the layout determines."""
    layout = LAYOUTS[layout_name]
    reading = layout.read(contents)
    if layout.native:
        _check_no_fields(source, fields)
        model = reading.fields
        num_classes = reading.num_classes
        flat = _fit_native(reading.arrays, model, num_classes, reading.preprocess)
    else:
        model, num_classes, flat = _fit(reading, layout, source, fields)
    if reading.doubt and 'gelu' not in fields:
        log.warning('%s %s', source, reading.doubt)
    loaded = Weights(
        flax.traverse_util.unflatten_dict(flat, sep='/'),
        model,
        num_classes,
        _known_classes(reading.classes, num_classes, source),
        reading.preprocess,
        layout_name,
        source,
        reading.loss,
    )
    loaded = _with_partial_patches(_with_usual_preprocess(loaded, layout))
    _check_images(loaded)
    return loaded


def _fit_native(arrays, model, num_classes, preprocess):
    """Arrays with our names and shapes; UserError unless they are the parameters of the model."""
    templates = model_lib.templates(model, num_classes, arrays, preprocess)
    matches = [(table.Entry((name,), name), x) for name, x in arrays.items()]
    return table.fit(matches, [], templates, ())


def _fit(reading, layout, source, fields):
    """Returns (fields of the model, number of classes, parameters by flat name, layers stacked)."""
    matches, unknown = table.translate(reading.arrays, reading.table)
    parameters = table.parameters(matches)
    model, num_classes = model_lib.describe(parameters, {**reading.fields, **fields})
    templates = model_lib.templates(model, num_classes, parameters, reading.preprocess)
    single = table.fit(matches, unknown, table.unstack(templates), layout.table(model))
    flat = table.stack(single, templates)
    guessed = _guessed_fields(parameters, model, num_classes, reading, fields)
    if guessed:
        log.warning(
            '%s does not say %s of its model, which arrays do not show, and no published model has '
            'its sizes: the program assumes %s. For other values add --model FIELD=VALUE; for '
            'training, to vit_jax.convert.',
            source,
            ' and '.join(guessed),
            ', '.join(f'{field}={model[field]}' for field in guessed),
        )
    return model, num_classes, flat


def _guessed_fields(parameters, model, num_classes, reading, fields):
    """Names of guessed fields, which neither the user, the source nor the sizes determine."""
    query = parameters.get('blocks/0/attention/query/kernel')
    if query is None or query.ndim > 2 or model_lib.heads_are_published(model, num_classes):
        return []
    names = list(reading.assumed)
    if 'num_heads' not in reading.fields:
        names.insert(0, 'num_heads')
    return [name for name in names if name not in fields]


def _known_classes(classes, num_classes, source):
    """The class names; None, with a warning, if their number differs from the head's."""
    if classes is None or len(classes) == num_classes:
        return classes
    log.warning(
        '%s names %d classes, but its head has %d: the names are ignored',
        source,
        len(classes),
        num_classes,
    )
    return None


def _with_usual_preprocess(loaded, layout):
    """Uses and logs the usual `preprocess` of the program or model if the source states none."""
    usual = None if loaded.preprocess else layout.usual_preprocess(loaded)
    if not usual:
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


def _with_partial_patches(loaded):
    """Lets the model drop the rest of an image that patches do not tile, as other programs do.

    For example, patches of 14x14 pixels do not tile images of 384x384.
    """
    dropping = dataclasses.replace(loaded, model=loaded.model | {'partial_patches': 'drop'})
    stated = dropping.stated_grid()
    is_needed = stated and not loaded.stated_grid()
    if is_needed and dropping.grid() in (None, stated):
        return dropping
    return loaded


def _check_images(loaded):
    """Raises UserError unless means and deviations are for the channels of the images."""
    channels = loaded.channels()
    for field in ('mean', 'std'):
        numbers = (loaded.preprocess or {}).get(field)
        if numbers and len(numbers) not in (3, channels):
            raise UserError(
                f'preprocess.{field} is {numbers}: expected a number for each of {channels} '
                'channels.',
                kind='content',
                field=f'preprocess.{field}',
                value=numbers,
            )


def _check_finite(loaded):
    """Raises UserError, with counts by array, for values that are not finite in float32."""
    counts = []
    for name, x in flatten(loaded.params).items():
        with np.errstate(over='ignore'):
            num_nonfinite = x.size - np.count_nonzero(np.isfinite(np.asarray(x, np.float32)))
        if num_nonfinite:
            counts.append(f'{num_nonfinite:,} of {x.size:,} in {name}')
    if counts:
        raise UserError(
            f'{loaded.source} has values that are not finite: {some(counts, 4)}. Its training '
            'diverged, or the file is damaged: choose an earlier checkpoint, or copy or download '
            'it again. evaluate, predict and convert accept it with --allow_nonfinite.',
            kind='content',
            file=loaded.source,
        )
