"""Tables of the results of runs, their pre-training compute, and speeds (figures 4 to 13)."""

import functools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax import models
from vit_jax.errors import Inapplicable, UserError
from vit_jax.files import read_text
from vit_jax.models import cost, variants
from vit_jax.models.patch_grid import as_pair
from vit_jax.weights.model import with_defaults
from vit_jax.workdir import descriptions, metrics, record, saved_params

log = logging.getLogger(__name__)

FEWSHOT = r'fewshot/\d+shot'


@functools.lru_cache(1)  # several figures use the same table
def evaluations(workdirs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns a table with a row for each evaluation of each run.

    The log names runs without an evaluation.

    Args:
      workdirs: workdirs of runs, or their checkpoints.

    Returns:
      Columns by name:
        run: the path;
        model: its name or sizes;
        family: 'ViT', 'hybrid' or 'ResNet';
        step;
        epochs;
        accuracy: in [0, 1], NaN if the run predicts hidden patches;
        final: whether it is the last row of the run;
        flops: of the pre-training so far, three forward passes per image, NaN if unknown;
        examples: number of training images of the pre-training, NaN if unknown;
        fewshot/Nshot and fewshot/Nshot_deviation: NaN for runs without them.
      The pre-training of a run is the run of the workdir in config.pretrained, or else the run
      itself.

    Raises:
      UserError: a path is not a workdir.
      Inapplicable: no run has an evaluation.
    """
    rows: list[dict[str, Any]] = []
    without_rows = []
    for workdir in dict.fromkeys(workdirs):
        rows_of_run = list(_rows_of_run(workdir))
        rows += rows_of_run
        if not rows_of_run:
            without_rows.append(workdir)
    if without_rows:
        reason = f'have no evaluation ({metrics.ACCURACY} in {metrics.FILE})'
        if not rows:
            raise Inapplicable(f'these runs {reason}: {", ".join(without_rows)}')
        log.warning('Skipped runs that %s: %s', reason, ', '.join(without_rows))
    names: dict[str, None] = {}  # in the order of the columns
    for row in rows:
        names |= dict.fromkeys(row)
    return {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}


def _rows_of_run(path) -> Iterator[dict[str, Any]]:
    place = record.find(path)
    if place is None:
        raise UserError(
            f'--workdir is {path}, which is not the workdir of a run: expected a workdir, or one '
            'of its checkpoints (WORKDIR/checkpoints/STEP).',
            kind='missing',
            field='--workdir',
            file=path,
        )
    workdir, _ = place
    config, _ = record.read(workdir)
    rows = [row for row in metrics.read(workdir) if metrics.ACCURACY in row]
    pretraining_config, pretraining_steps = _pretraining(config)
    flops_per_step = math.nan
    examples = math.nan
    if pretraining_config is not None:
        flops_per_step = _flops_per_step(pretraining_config)
        examples = pretraining_config['dataset']['num_examples']
    accuracy = descriptions.of_names(workdir, [metrics.ACCURACY], config)[metrics.ACCURACY]
    predicts_classes = accuracy.panel == 'accuracy'
    for row in rows:
        steps = row['step'] if pretraining_steps is None else pretraining_steps
        yield {
            'run': workdir,
            'model': _model_name(config['model']),
            'family': _family(config['model']),
            'step': row['step'],
            'accuracy': row[metrics.ACCURACY] if predicts_classes else math.nan,
            'final': row is rows[-1],
            'epochs': row['step'] * config['batch_size'] / config['dataset']['num_examples'],
            'flops': flops_per_step * steps,
            'examples': examples,
            **{name: value for name, value in row.items() if re.match(FEWSHOT, name)},
        }


def _pretraining(config):
    """(config, number of steps) of the pre-training of a run.

    The config is None if the pre-training is unknown. The number of steps is None if the run itself
    is the pre-training.
    """
    source = config.get('pretrained')
    if not source:
        return config, None
    place = record.find(source)
    if place is None:
        return None, None
    workdir, step = place
    if step is None:
        step = _step_of_weights(workdir)
    return record.read(workdir)[0], step


def _step_of_weights(workdir):
    """The step that weights.load reads from a workdir: the best or the newest."""
    steps = record.saved_steps(record.checkpoint_directory(workdir))
    if not steps:
        steps = [row['step'] for row in metrics.read(workdir)]
    best = saved_params.kept_best(workdir, steps)
    if best:
        return best[0]
    return max(steps, default=math.nan)


def _flops_per_step(config):
    """FLOPs of a step, as three forward passes for every image of the batch."""
    model = models.build(with_defaults(config['model']), config['dataset']['num_classes'])
    flops = cost.of_model(model, as_pair(config['image_size'])).flops
    return 3 * flops * config['batch_size']


def _model_name(model):
    """The name of a model, or its sizes, from its fields."""
    name = variants.name_of(model)
    if name is not None:
        return name
    if 'hidden_size' in model:
        return f'{model["hidden_size"]}x{model["num_layers"]}'
    resnet = model['resnet']
    return f'{resnet["width"]}x{sum(resnet["units"])}'


def _family(model):
    """'ViT', 'hybrid' or 'ResNet', from the fields of a model."""
    if not model.get('resnet'):
        return 'ViT'
    if 'hidden_size' in model:
        return 'hybrid'
    return 'ResNet'


def with_pretraining(workdirs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns the rows of `evaluations` with an accuracy of classes and a known pre-training.

    Raises:
      Inapplicable: there are no such rows.
    """
    table = evaluations(workdirs)
    table = _selected(
        table,
        np.isfinite(table['accuracy']),
        'predict colours of hidden patches and no classes (use runs that were fine-tuned from '
        'them)',
    )
    return _selected(
        table,
        np.isfinite(table['flops']),
        'have an unknown pre-training (config.pretrained is not the workdir of a run)',
    )


def _selected(table: Mapping[str, np.ndarray], mask, reason: str) -> dict[str, np.ndarray]:
    """Selects rows of a table by a mask. The log names runs without such rows, with the reason."""
    if not mask.any():
        raise Inapplicable(f'these runs {reason}')
    rows = {name: column[mask] for name, column in table.items()}
    for name in list(rows):
        if re.match(FEWSHOT, name) and np.isnan(rows[name]).all():
            del rows[name]
    skipped = [run for run in dict.fromkeys(table['run']) if run not in rows['run']]
    if skipped:
        log.warning('Skipped runs that %s: %s', reason, ', '.join(skipped))
    return rows


def with_few_shots(workdirs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Returns the rows of `evaluations` with few-shot accuracies.

    Raises:
      Inapplicable: there are no such rows.
    """
    table = evaluations(workdirs)
    accuracies = [column for name, column in table.items() if re.match(FEWSHOT, name)]
    return _selected(
        table,
        np.isfinite(accuracies).any(0),
        'have no few-shot accuracies (train with --config.evals.fewshot.shots=5)',
    )


def speeds(paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns a table with a row for each output of `vit_jax.benchmark --json`.

    Args:
      paths: text files with these outputs.

    Returns:
      Columns by name: `model`, `setting` (device and dtype), `pixels` (side of the square with the
      area of the images), `batch_size`, and `images_per_second` of inference.

    Raises:
      UserError: a file has other content.
    """
    rows = [_row_of_benchmark(path) for path in paths]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _row_of_benchmark(path) -> dict[str, Any]:
    try:
        result = json.loads(read_text(path).strip().splitlines()[-1])
        return {
            'model': result.get('model') or result['recipe'],
            'setting': f'{result["devices"]} x {result["device"]}, {result["dtype"]}',
            'pixels': math.sqrt(math.prod(result['image_size'])),
            'batch_size': result['batch_size'],
            'images_per_second': result['subjects']['inference']['images_per_second'],
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f'--benchmark={path} cannot be read ({type(error).__name__}: {error}): expected the '
            'output of vit_jax.benchmark --json, with inference among its --parts.',
            kind='content',
            field='--benchmark',
            file=path,
        ) from error
