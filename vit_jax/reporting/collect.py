"""What a page shows of a run, as plain data: from the files of its workdir, its data, its model."""

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

# What the data and the machine decide where a config leaves it open: no choice of the run.
FOUND = {
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
NOTES = 'report.json'  # what a sweep or vtab says of each run, for a page that is written again
PARTS = ('data', 'model', 'predictions', 'inspection')  # what the files of a workdir do not tell


def run(workdir: str, images: int, seconds: float = math.inf) -> dict[str, Any]:
    """Everything that a page shows of one run.

    Args:
      images: evaluated at most, in the order of the split that scored the run; 0 leaves out all
        that needs the model or the data, and then neither TensorFlow nor a device is used.
      seconds: after which evaluation stops, with as many images as it has.

    Returns `name`, `workdir`, `config` (by dotted field), `differences` and the name of what it is
    `compared_with`, `classes`, `num_steps` of the whole run, `rows` (of metrics.jsonl), `metrics`,
    what the names in the rows of evaluations are, `summary`;
    `model`, `data`, `predictions` and `inspection`, what the functions named below return, None
    where `missing` has a sentence for the same key instead.

    Raises UserError if the directory is not the workdir of a run.
    """
    config, classes, rows = *read(workdir), metrics.read(workdir)
    flat = config_lib.flatten(config)
    metrics_of = descriptions.of_names(workdir, descriptions.names_in(rows), config)
    reference, compared_with = reference_of(workdir, flat)
    found: dict[str, Any] = {
        'name': os.path.basename(os.path.abspath(workdir)),
        'workdir': workdir,
        'config': flat,
        'classes': classes,
        'rows': rows,
        'num_steps': config_lib.total_steps(ConfigDict(config)),
        'compared_with': compared_with,
        'differences': differences(flat, reference),
        'metrics': metrics_of,
        'summary': summary(rows, flat['batch_size'], metrics_of),
        'missing': {},
        **dict.fromkeys(PARTS),
    }
    if not images:
        found['missing'] = dict.fromkeys(
            PARTS,
            'The model and the data were not used for this page: python -m vit_jax.report '
            f'{shlex.quote(workdir)} adds this part.',
        )
        return found

    try:  # they import TensorFlow
        from vit_jax.reporting import data, explorer, model, predictions
    except ModuleNotFoundError as error:
        found['missing'] = dict.fromkeys(PARTS, f"{error}: pip install -e '.[train]' brings it.")
        return found
    attempt(found, 'data', lambda: data.describe(config, classes))
    attempt(found, 'model', lambda: model.load(workdir, config))
    if loaded := found['model']:
        attempt(found, 'predictions', lambda: predictions.evaluate(loaded, images, seconds))
        attempt(found, 'inspection', lambda: explorer.inspect(loaded))
        found['model'] = loaded.facts()
    for part, reason in found['missing'].items():
        log.info('%s: the page is without %s: %s', workdir, part, reason)
    if not loaded:
        found['missing'] |= dict.fromkeys(PARTS[2:], found['missing']['model'])
    return found


def workdirs(directory: str) -> dict[str, str]:
    """Those in the directory, and what is to be said of each; itself if it is one or has none.

    First those of which a sweep or vtab has said something, in its order, then others by name.
    """
    if not os.path.isdir(directory) or os.path.isfile(os.path.join(directory, record.CONFIG)):
        return {directory: ''}
    notes = {}
    with contextlib.suppress(UserError):  # of no sweep, of an older version, or damaged
        notes = read_json(os.path.join(directory, NOTES), dict)
    names = notes | {name: notes.get(name, '') for name in sorted(os.listdir(directory))}
    runs = {
        os.path.join(directory, name): str(note)
        for name, note in names.items()
        if os.path.isfile(os.path.join(directory, name, record.CONFIG))
    }
    return runs or {directory: ''}


def read(workdir: str) -> tuple[dict[str, Any], list[str]]:
    """Config, with defaults for fields newer than the run, and class names of a workdir."""
    if not os.path.isfile(os.path.join(workdir, record.CONFIG)):
        raise UserError(
            f'{workdir} is not the workdir of a run: it has no {record.CONFIG}. Name '
            'the --workdir of python -m vit_jax.main, or a directory of such.'
        )
    config, classes = record.read(workdir)
    defaults = {
        name: x
        for name, x in config_lib.flatten(config_lib.base()).items()
        if not name.startswith('model.')
    }
    return traverse_util.unflatten_dict(defaults | config_lib.flatten(config), sep='.'), classes


def reference_of(workdir: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The config, by dotted field, that a run departs from, and what it is called.

    That of the file which --config named, as the run has recorded it; of runs that have not, the
    defaults of all fields.
    """
    try:
        found = read_json(os.path.join(workdir, record.RECIPE), dict)
        if isinstance(found.get('config'), dict) and isinstance(found.get('file'), str):
            return found['config'], found['file']
    except UserError:  # of an older version, or damaged: the page is worth more than this part
        pass
    base = config_lib.flatten(config_lib.base())
    if 'model.hidden_size' not in config:  # a ResNet has other fields than those of base()
        base = {name: x for name, x in base.items() if not name.startswith('model.')}
    return base, DEFAULTS


def differences(config: Mapping[str, Any], reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields that differ: name, both values, and what the field means.

    A value is None where a config does not have the field. What the data or the machine decided
    is left out.
    """
    found = []
    for name in sorted((config.keys() | reference.keys()) - FOUND):
        value, other = config.get(name), reference.get(name)
        is_chosen = name == 'model.dtype' and other == models.OPEN['dtype']
        if value != other and not is_chosen:
            field = config_lib.field_named(name)
            found.append(
                {
                    'field': name,
                    'value': value,
                    'reference': other,
                    'meaning': field.meaning if field else '',
                }
            )
    return found


def summary(
    rows: Sequence[Mapping[str, float]],
    batch_size: int,
    described: Mapping[str, Metric] | None = None,
) -> dict[str, Any]:
    """The result of a run from its rows of metrics.

    Args:
      described: the metrics of evaluations by name; None: as their names imply.

    Returns `headline`, the name of the metric that tells how good the model is, None without one;
    `last` and `best`, the rows of the last evaluation and of that with its best value, None
    without one; `others`, the last values of other evaluators by name; `steps`; `seconds` of
    training and evaluation, None where nothing tells; `images_per_sec`, the median.
    """
    if described is None:
        described = {name: descriptions.assumed(name) for name in descriptions.names_in(rows)}
    headline = descriptions.headline(described)
    main = [name for name in described if name.startswith(f'{MAIN}/')]
    evaluations = [row for row in rows if any(name in row for name in main)]
    best = None
    if headline is not None:
        scores = metrics.scores(evaluations, headline)
        best = metrics.best(scores, scores, described[headline])
    others: dict[str, float] = {}
    for row in rows:
        others |= {name: row[name] for name in described if name in row and name not in main}
    speeds = [*filter(None, metrics.scores(rows, 'train/images_per_sec').values())]
    return {
        'headline': headline,
        'last': evaluations[-1] if evaluations else None,
        'best': next((row for row in evaluations if row['step'] == best), None),
        'others': others,
        'steps': rows[-1]['step'] if rows else 0,
        'seconds': progress.taken(rows, batch_size) if speeds else None,
        'images_per_sec': statistics.median(speeds) if speeds else None,
    }
