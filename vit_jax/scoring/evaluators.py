"""Scores weights by an evaluator that the command evaluate or the config of a run names."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

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
from vit_jax.weights import Loaded, description
from vit_jax.workdir import record


@dataclasses.dataclass(frozen=True)
class Section:
    """An evaluator to run, as options of the command or a section of config.evals describe it.

    Attributes:
      name: prefix of its metrics.
      kind: one of registry.TYPES, or PACKAGE.MODULE:FUNCTION.
      options: the options of the evaluator, NAME=VALUE with commas between them.
      train_split: split that frozen features learn from; None for dataset.train_split.
      labels: path of a JSON file with other labels, see data/relabelled.py.
      mapping: path of a JSON file with other classes, see data/relabelled.py.
    """

    name: str
    kind: str
    options: str = ''
    train_split: str | None = None
    labels: str | None = None
    mapping: str | None = None


def section_of(workdir: str, name: str) -> dict[str, Any]:
    """The fields of an evaluator that a run has recorded under `evals.NAME`.

    Raises:
      UserError: if the workdir has no run, or the run has no such evaluator.
    """
    place = record.find(workdir)
    if place is None:
        raise UserError(
            f'--workdir={workdir} is not the workdir of a run, nor a checkpoint of one.',
            kind='content',
            field='--workdir',
            file=workdir,
        )
    sections = dict(record.read(place[0])[0].get('evals', {}))
    sections.pop('fewshot', None)
    if name not in sections:
        known = ', '.join(sections) or 'none'
        raise UserError(
            f'--evals has {name!r}. {nearest_names(name, sections)}The evaluators in config.evals '
            f'of {workdir} are: {known}. For another one: --type=TYPE.',
            kind='unknown',
            field='--evals',
            value=name,
        )
    defaults = {field: about.default for field, about in EVALUATOR_FIELDS.items()}
    return defaults | dict(sections[name])


def name_of(kind: str) -> str:
    """The prefix of the metrics of an evaluator type: 'balanced' for my_lab.x:balanced."""
    return kind.rpartition(':')[2]


class _OpenedSplits:
    """Opens the splits of an evaluator, and remembers them for the names of broken images."""

    def __init__(self, loaded, dataset, section, settings):
        self._weights = loaded.weights
        self._dataset = dataset
        self._section = section
        self._settings = settings
        self._opened = []

    def open_test(self) -> Split:
        """The split that is scored, with labels in the order of the weights' classes."""
        source = split.open_labelled_source(
            self._dataset, self._weights, self._section.labels, self._section.mapping
        )
        return self._batched(source, self._dataset['eval_split'])

    def open_pair(self) -> tuple[Split, Split]:
        """The splits that frozen features learn from and are scored on."""
        train_split = self._section.train_split or self._dataset['train_split']
        subset = '' if self._section.train_split else self._dataset['subset']
        train, test = fewshot.open_sources(self._dataset, train_split, subset)
        where = f'{self._dataset["name"]}, {train_split},'
        return self._batched(train, where), self._batched(test, self._dataset['eval_split'])

    def broken(self) -> list[str]:
        """The names of the broken images."""
        return split.broken_of_splits(self._opened)

    def _batched(self, source, where):
        from vit_jax.data import pipeline  # imports TensorFlow

        opened = Split(source, pipeline.eval_batches(source, **self._settings), where)
        self._opened.append(opened)
        return opened


def score(
    loaded: Loaded, dataset: dict[str, Any], section: Section, batch_size: int
) -> dict[str, Any]:
    """Runs an evaluator on weights.

    Args:
      loaded: the weights and their model.
      dataset: the section `dataset` from split.dataset_of; its eval_split is scored.
      section: the evaluator.
      batch_size: the batch size of all devices together.

    Returns:
      `dataset`, `split`, `evaluator` (the kind), the value of each metric as NAME/METRIC, `metrics`
      (the description of each metric by the same name), and `broken`, the names of broken images.

    Raises:
      UserError: if the evaluator or its data cannot be used.
    """
    weights = loaded.weights
    mesh = split.make_mesh(batch_size)
    settings = split.batch_settings(weights, mesh, batch_size, dataset['files_at_once'])
    splits = _OpenedSplits(loaded, dataset, section, settings)
    class_names: tuple[str, ...] = ()
    if weights.num_classes:
        class_names = tuple(description.class_names(weights))
    context = Context(
        name=f'the evaluator {section.name}',
        options=Options('--options', section.options),
        class_names=class_names,
        encoder=loaded.module,
        encoder_params=all_parameters,
        loss=losses.make_evaluation_loss(weights.loss or 'softmax'),
        devices=split.devices(loaded.module, mesh, batch_size, weights.image_size()),
        open_test=splits.open_test,
        open_pair=splits.open_pair,
    )
    evaluator = context.evaluator(registry.build(section.kind, '--type', context))
    values = evaluator.run(feeding.replicate(loaded.params, mesh), never)
    assert values is not None  # nothing interrupts it
    described = metric_lib.described(section.name, evaluator.metrics)
    return {
        'dataset': dataset['name'],
        'split': dataset['eval_split'],
        'evaluator': section.kind,
        **{f'{section.name}/{metric}': float(value) for metric, value in values.items()},
        'metrics': {key: metric_lib.as_json(metric) for key, metric in described.items()},
        'broken': splits.broken(),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result of `score` as a table, with a line for each metric."""
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
