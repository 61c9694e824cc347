"""The content of a page, as plain data: from the files of a workdir, its data and its model."""

import contextlib
import logging
import math
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.evaluators.metric import MAIN, Metric
from vit_jax.files import read_json
from vit_jax.reporting.attempts import attempt
from vit_jax.workdir import descriptions, metrics, progress, record

log = logging.getLogger(__name__)

# Fields that the data or the machine decides if a config leaves them open. Pages do not compare
# these fields.
DECIDED = {
    'recipe',
    'accum_steps',
    'mesh.host_devices',
    *config_lib.PER_MACHINE,
    'dataset.num_examples',
    'dataset.num_classes',
    'dataset.multi_label',
    'teacher.checksum',
}
DEFAULTS = 'the defaults of all fields'
NOTES = 'report.json'  # notes of a sweep or vtab on each run, for a later page
PARTS = ('data', 'model', 'predictions', 'inspection')  # parts that need the data or the model


def run(workdir: str, images: int, seconds: float = math.inf) -> dict[str, Any]:
    """Returns the content of the page of one run.

    Args:
      workdir: the workdir of the run.
      images: largest number of evaluated images, in the order of dataset.eval_split; 0 leaves out
        everything that needs the model or the data, and uses neither TensorFlow nor a device.
      seconds: evaluation stops after this time, with the images evaluated so far.

    Returns:
      `name`, `workdir`, `config` (by dotted field), `classes`, `rows` (of metrics.jsonl),
      `num_steps` (of the whole run), `metrics` (descriptions of the evaluations' metrics),
      `summary`, `differences` and the name of the config that the run is `compared_with`; and
      `data`, `model`, `predictions` and `inspection` from the modules of these names. If one of
      these four is None, `missing` has a sentence with the same key.

    Raises:
      UserError: if the directory is not the workdir of a run.
    """
    config, classes = read(workdir)
    rows = metrics.read(workdir)
    flat = config_lib.flatten(config)
    metrics_of_run = descriptions.of_names(workdir, descriptions.names_in(rows), config)
    reference, compared_with = reference_of(workdir, flat)
    content: dict[str, Any] = {
        'name': os.path.basename(os.path.abspath(workdir)),
        'workdir': workdir,
        'config': flat,
        'classes': classes,
        'rows': rows,
        'num_steps': config_lib.total_steps(ConfigDict(config)),
        'compared_with': compared_with,
        'differences': differences(flat, reference),
        'metrics': metrics_of_run,
        'summary': summary(rows, flat['batch_size'], metrics_of_run),
        'missing': {},
        **dict.fromkeys(PARTS),
    }
    if images:
        _add_parts(content, config, images, seconds)
    else:
        content['missing'] = dict.fromkeys(
            PARTS,
            'This page was made without the model and the data: python -m vit_jax.report '
            f'{shlex.quote(workdir)} adds this part.',
        )
    return content


def _add_parts(content, config, images, seconds):
    """Adds the parts that need the data or the model, or why they are missing."""
    workdir = content['workdir']
    try:  # these modules import TensorFlow
        from vit_jax.reporting import data, explorer, model, predictions
    except ModuleNotFoundError as error:
        content['missing'] = dict.fromkeys(
            PARTS, f"{error}: install it with pip install -e '.[train]'."
        )
        return
    attempt(content, 'data', lambda: data.describe(config, content['classes']))
    attempt(content, 'model', lambda: model.load(workdir, config))
    loaded = content['model']
    if loaded:
        attempt(content, 'predictions', lambda: predictions.evaluate(loaded, images, seconds))
        attempt(content, 'inspection', lambda: explorer.inspect(loaded))
        content['model'] = loaded.facts()
    for part, reason in content['missing'].items():
        log.info('%s: the page has no %s: %s', workdir, part, reason)
    if not loaded:
        for part in ('predictions', 'inspection'):
            content['missing'][part] = content['missing']['model']


def workdirs(directory: str) -> dict[str, str]:
    """Returns the workdirs in a directory, each with its note.

    The runs of a sweep or vtab come first, in its order, then other runs by name. If the directory
    is itself a workdir or has no workdirs, it is the only entry.
    """
    if not os.path.isdir(directory) or os.path.isfile(os.path.join(directory, record.CONFIG)):
        return {directory: ''}
    notes = {}
    # The file is missing if no sweep wrote it, or an older version did; it may be damaged.
    with contextlib.suppress(UserError):
        notes = read_json(os.path.join(directory, NOTES), dict)
    names = notes | {name: notes.get(name, '') for name in sorted(os.listdir(directory))}
    runs = {
        os.path.join(directory, name): str(note)
        for name, note in names.items()
        if os.path.isfile(os.path.join(directory, name, record.CONFIG))
    }
    return runs or {directory: ''}


def read(workdir: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the config and the class names of a run.

    Fields that are newer than the run have their defaults.

    Raises:
      UserError: if the directory is not the workdir of a run.
    """
    if not os.path.isfile(os.path.join(workdir, record.CONFIG)):
        raise UserError(
            f'{workdir} is not the workdir of a run: it has no {record.CONFIG}. Give the --workdir '
            'of python -m vit_jax.main, or a directory that contains workdirs.',
            kind='missing',
            file=workdir,
        )
    config, classes = record.read(workdir)
    values = {
        name: default
        for name, default in config_lib.flatten(config_lib.base()).items()
        if not name.startswith('model.')
    }
    values |= config_lib.flatten(config)
    return traverse_util.unflatten_dict(values, sep='.'), classes


def reference_of(workdir: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the reference config of the page of a run, by dotted field, and its name.

    The reference is the recipe (the value of --config) as the run has recorded it. A run that did
    not record it is compared with the defaults of all fields.

    Args:
      workdir: the workdir of the run.
      config: the config of the run, by dotted field.
    """
    try:
        recorded = read_json(os.path.join(workdir, record.RECIPE), dict)
        if isinstance(recorded.get('config'), dict) and isinstance(recorded.get('file'), str):
            return recorded['config'], recorded['file']
    except UserError:  # the file is damaged or of an older version; the page is useful without it
        pass
    base = config_lib.flatten(config_lib.base())
    if 'model.hidden_size' not in config:  # a ResNet has other fields than the model of base()
        base = {name: x for name, x in base.items() if not name.startswith('model.')}
    return base, DEFAULTS


def differences(config: Mapping[str, Any], reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the fields that differ, without fields that the data or the machine decided.

    Returns:
      For each field `field`, `value`, `reference` (None if a config does not have the field) and
      `meaning`.
    """
    differing = []
    for name in sorted((config.keys() | reference.keys()) - DECIDED):
        value = config.get(name)
        other = reference.get(name)
        is_decided = name == 'model.dtype' and other == models.OPEN['dtype']
        if value == other or is_decided:
            continue
        field = config_lib.field_named(name)
        meaning = ''
        if field:
            meaning = field.meaning
        differing.append({'field': name, 'value': value, 'reference': other, 'meaning': meaning})
    return differing


def summary(
    rows: Sequence[Mapping[str, float]],
    batch_size: int,
    described: Mapping[str, Metric] | None = None,
) -> dict[str, Any]:
    """Returns the result of a run.

    Args:
      rows: the rows of metrics.jsonl.
      batch_size: images per step.
      described: the metrics of evaluations by name; None: the metrics that their names imply.

    Returns:
      `headline`, the name of the metric that ranks models, or None; `last` and `best`, the rows of
      the last and of the best evaluation, or None; `others`, the last values of other evaluators by
      name; `steps`; `seconds` of training and evaluation, None if unknown; `images_per_sec`, the
      median, None if unknown.
    """
    if described is None:
        described = {name: descriptions.assumed(name) for name in descriptions.names_in(rows)}
    headline = descriptions.headline(described)
    main = [name for name in described if name.startswith(f'{MAIN}/')]
    evaluations = [row for row in rows if any(name in row for name in main)]
    last = None
    if evaluations:
        last = evaluations[-1]
    best = None
    if headline is not None:
        scores = metrics.scores(evaluations, headline)
        best_step = metrics.best(scores, scores, described[headline])
        best = next((row for row in evaluations if row['step'] == best_step), None)
    others: dict[str, float] = {}
    for row in rows:
        others |= {name: row[name] for name in described if name in row and name not in main}
    steps: float = 0
    if rows:
        steps = rows[-1]['step']
    seconds = None
    images_per_sec = None
    speeds = [x for x in metrics.scores(rows, 'train/images_per_sec').values() if x]
    if speeds:
        seconds = progress.taken(rows, batch_size)
        images_per_sec = statistics.median(speeds)
    return {
        'headline': headline,
        'last': last,
        'best': best,
        'others': others,
        'steps': steps,
        'seconds': seconds,
        'images_per_sec': images_per_sec,
    }
