"""What several runs have reached, and what they and their pre-training took (figures 4 to 13)."""

import functools
import json
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax import models
from vit_jax.errors import Inapplicable, UserError
from vit_jax.files import read_text
from vit_jax.models import cost, variants
from vit_jax.models.vit import as_pair
from vit_jax.weights.model import with_defaults
from vit_jax.workdir import descriptions, metrics, record, saved_params

log = logging.getLogger(__name__)

FEWSHOT = r'fewshot/\d+shot'


@functools.lru_cache(1)  # of which there are several figures
def evaluations(workdirs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """A row for each evaluation of each run, as columns by name.

    `run`: the path; `model` and `family` (ViT, hybrid or ResNet); `step`; `epochs`; `accuracy` in
    [0, 1], NaN where hidden patches are predicted; `final`, of the run's last row. `flops` and
    `examples` are of the pre-training: three forward passes for each image seen, and the size of
    its training split. It is that of the workdir that config.pretrained names or, without
    pre-trained weights, the run itself so far; NaN where it is not known. `fewshot/Nshot` and
    `fewshot/Nshot_deviation`, where any run has them, are NaN for others. The log names runs that
    have no evaluation. Raises UserError for what is no workdir, Inapplicable if no run has any.
    """
    found = {workdir: list(_of_run(workdir)) for workdir in workdirs}
    rows = [row for of_run in found.values() for row in of_run]
    if without := [workdir for workdir, of_run in found.items() if not of_run]:
        why = f'no evaluation ({metrics.ACCURACY} in {metrics.FILE}): {", ".join(without)}'
        if not rows:
            raise Inapplicable(f'these runs have {why}')
        log.warning('left out, as they have %s', why)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}


def _of_run(workdir):
    if (place := record.find(workdir)) is None:
        raise UserError(
            f'--workdir={workdir} is not the workdir of a run, nor a checkpoint of '
            'one (WORKDIR/checkpoints/STEP).'
        )
    workdir, _ = place
    config, _ = record.read(workdir)
    found = [row for row in metrics.read(workdir) if metrics.ACCURACY in row]
    before, end = _pretraining(config)
    per_step = before and _flops_per_step(before)
    accuracy = descriptions.of_names(workdir, [metrics.ACCURACY], config)[metrics.ACCURACY]
    of_classes = accuracy.panel == 'accuracy'
    for row in found:
        yield {
            'run': workdir,
            **dict(zip(('model', 'family'), _name(config['model']), strict=True)),
            'step': row['step'],
            'accuracy': row[metrics.ACCURACY] if of_classes else math.nan,
            'final': row is found[-1],
            'epochs': row['step'] * config['batch_size'] / config['dataset']['num_examples'],
            'flops': per_step * (row['step'] if end is None else end) if before else math.nan,
            'examples': before['dataset']['num_examples'] if before else math.nan,
            **{name: value for name, value in row.items() if re.match(FEWSHOT, name)},
        }


def _pretraining(config):
    """(config, steps) of the run that a run's weights come from; steps None for the run itself."""
    source = config.get('pretrained')
    if not source:
        return config, None
    found = record.find(source)
    if found is None:
        return None, None
    workdir, step = found
    if step is None:  # its best or newest, as weights.load takes it
        steps = record.saved_steps(record.checkpoint_directory(workdir)) or [
            row['step'] for row in metrics.read(workdir)
        ]
        best = saved_params.kept_best(workdir, steps)
        step = best[0] if best else max(steps, default=math.nan)
    return record.read(workdir)[0], step


def _flops_per_step(config):
    """As usually counted: three forward passes for every image of the batch."""
    model = models.build(with_defaults(config['model']), config['dataset']['num_classes'])
    flops = cost.of_model(model, as_pair(config['image_size'])).flops
    return 3 * flops * config['batch_size']


def _name(model):
    """(name, family) of the fields of a model."""
    resnet, transformer = model.get('resnet'), 'hidden_size' in model
    family = 'hybrid' if resnet and transformer else 'ResNet' if resnet else 'ViT'
    sizes = (
        f'{model["hidden_size"]}x{model["num_layers"]}'
        if transformer
        else f'{resnet["width"]}x{sum(resnet["units"])}'
    )
    return variants.name_of(model) or sizes, family


def with_pretraining(workdirs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The rows of `evaluations` whose accuracy and pre-training are known.

    Raises Inapplicable if there are none.
    """
    table = evaluations(workdirs)
    table = _only(
        table,
        np.isfinite(table['accuracy']),
        'predict colours of hidden patches and no '
        'classes (give runs that were fine-tuned from them)',
    )
    return _only(
        table,
        np.isfinite(table['flops']),
        'are of unknown pre-training (config.pretrained is not the workdir of a run)',
    )


def _only(table, chosen, why):
    """The chosen rows, Inapplicable if there are none; the log names runs that have none."""
    if not chosen.any():
        raise Inapplicable(f'these runs {why}')
    rows = {
        name: x[chosen]
        for name, x in table.items()
        if not (re.match(FEWSHOT, name) and np.isnan(x[chosen]).all())
    }
    if left_out := [run for run in dict.fromkeys(table['run']) if run not in rows['run']]:
        log.warning('left out, as they %s: %s', why, ', '.join(left_out))
    return rows


def with_few_shots(workdirs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The rows of `evaluations` with few-shot accuracies; Inapplicable if no run has any."""
    table = evaluations(workdirs)
    found = [x for name, x in table.items() if re.match(FEWSHOT, name)]
    return _only(
        table,
        np.isfinite(found).any(0),
        'have no few-shot accuracies (train with --config.evals.fewshot.shots=5)',
    )


def speeds(paths: Sequence[str]) -> dict[str, np.ndarray]:
    """A row for each file that `vit_jax.benchmark --json` has printed, as columns by name.

    `model`, `setting` (device and dtype), `pixels` (side of the square of as many pixels),
    `batch_size`, and images_per_second of inference. Raises UserError for other files.
    """
    rows = [_of_benchmark(path) for path in paths]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _of_benchmark(path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path).strip().splitlines()[-1])
        return {
            'model': found.get('model') or found['recipe'],
            'setting': f'{found["devices"]} x {found["device"]}, {found["dtype"]}',
            'pixels': math.sqrt(math.prod(found['image_size'])),
            'batch_size': found['batch_size'],
            'images_per_second': found['subjects']['inference']['images_per_second'],
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f'--benchmark={path} cannot be read ({type(error).__name__}: {error}): '
            'expected what vit_jax.benchmark --json prints last, with inference among '
            'its --parts.'
        ) from error
