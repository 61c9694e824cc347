"""The evaluators that the command evaluate names by a type, or a run by a section of its config."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
from jaxtyping import PyTree

from vit_jax.config_fields import EVALUATOR_FIELDS
from vit_jax.errors import UserError, counted, nearest_names
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators import registry
from vit_jax.evaluators.context import Context, Split
from vit_jax.evaluators.evaluator import never
from vit_jax.evaluators.metric import Metric
from vit_jax.objectives import losses
from vit_jax.objectives.objective import all_parameters
from vit_jax.options import Options
from vit_jax.parallel import feeding
from vit_jax.scoring import fewshot, split
from vit_jax.weights import Weights, description
from vit_jax.workdir import record


def section_of(workdir: str, name: str) -> dict[str, Any]:
    """The fields of an evaluator that a run has recorded under `evals.NAME`.

    Raises UserError if the run has no such evaluator.
    """
    place = record.find(workdir)
    if place is None:
        raise UserError(
            f'--workdir={workdir} is not the workdir of a run, nor a checkpoint of one.'
        )
    sections = dict(record.read(place[0])[0].get('evals', {}))
    sections.pop('fewshot', None)
    if name not in sections:
        known = ', '.join(sections) or 'none'
        raise UserError(
            f'--evals has {name!r}. {nearest_names(name, sections)}The evaluators in config.evals '
            f'of {workdir} are: {known}. For another one: --type=TYPE.'
        )
    defaults = {field: about.default for field, about in EVALUATOR_FIELDS.items()}
    return defaults | dict(sections[name])


def name_of(kind: str) -> str:
    """The name of an evaluator of a type, before its metrics: 'balanced' of my_lab.x:balanced."""
    return kind.rpartition(':')[2]


def score(
    loaded: Weights,
    model: nn.Module,
    params: PyTree,
    dataset: dict[str, Any],
    *,
    batch_size: int,
    name: str,
    kind: str,
    options: str = '',
    train_split: str | None = None,
    labels: str | None = None,
    mapping: str | None = None,
) -> dict[str, Any]:
    """What an evaluator says of the weights.

    Args:
      dataset: from split.dataset_of; its eval_split is scored.
      name: before the names of the metrics.
      kind: of registry.TYPES, or PACKAGE.MODULE:FUNCTION.
      options: of the evaluator, NAME=VALUE with commas between them.
      train_split: where frozen features learn; None: that of `dataset`.
      labels, mapping: paths of JSON files with other labels, see data/relabelled.py.

    Returns `dataset`, `split`, `evaluator` (the kind), NAME/METRIC of each metric, `metrics`, unit
    and direction of each by the same name, and `broken`, the images that are left out.
    """
    from vit_jax.data import pipeline  # imports TensorFlow

    mesh = split.make_mesh(batch_size)
    settings = split.batch_settings(loaded, mesh, batch_size, dataset['files_at_once'])
    opened = []

    def batched(source, where):
        made = Split(source, pipeline.eval_batches(source, **settings), where)
        opened.append(made)
        return made

    def open_test():
        source = split.open_labelled_source(dataset, loaded, labels, mapping)
        return batched(source, dataset['eval_split'])

    def open_pair():
        learned_from = train_split or dataset['train_split']
        subset = '' if train_split else dataset['subset']
        train, test = fewshot.open_sources(dataset, learned_from, subset)
        where = f'{dataset["name"]}, {learned_from},'
        return batched(train, where), batched(test, dataset['eval_split'])

    class_names: tuple[str, ...] = ()
    if loaded.num_classes:
        class_names = tuple(description.class_names(loaded))
    context = Context(
        name=f'the evaluator {name}',
        options=Options('--options', options),
        class_names=class_names,
        encoder=model,
        encoder_params=all_parameters,
        loss=losses.make_evaluation_loss(loaded.loss or 'softmax'),
        devices=split.devices(model, mesh, batch_size, loaded.image_size()),
        open_test=open_test,
        open_pair=open_pair,
    )
    made = registry.build(kind, '--type', context)
    evaluator = context.evaluator(made)
    values = evaluator.run(feeding.replicate(params, mesh), never)
    assert values is not None  # nothing interrupts it
    described = metric_lib.described(name, evaluator.metrics)
    broken = [path for each in opened for path in split.broken(each.batches)]
    return {
        'dataset': dataset['name'],
        'split': dataset['eval_split'],
        'evaluator': kind,
        **{f'{name}/{metric}': float(value) for metric, value in values.items()},
        'metrics': {key: metric_lib.as_json(metric) for key, metric in described.items()},
        'broken': broken,
    }


def table(result: Mapping[str, Any]) -> str:
    """The result of `score` in words: a line for each metric."""
    metrics: dict[str, Metric] = {
        key: metric_lib.from_json(fields) for key, fields in result['metrics'].items()
    }
    lines = _lines(metrics, result)
    broken = ''
    if result['broken']:
        broken = f', {counted(len(result["broken"]), "broken image")} left out'
    where = f'{os.path.normpath(result["dataset"])}, {result["split"]}'
    return '\n'.join([*lines, f'{result["evaluator"]} on {where}{broken}'])


def _lines(metrics: Mapping[str, Metric], result: Mapping[str, Any]) -> Sequence[str]:
    width = max(map(len, metrics), default=0)
    return [
        f'  {key:{width}}  {metric.text(result[key])}'
        for key, metric in metrics.items()
        if result.get(key) is not None
    ]
