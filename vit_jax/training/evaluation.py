"""The evaluators of a run: few-shot accuracy and those that config.evals names."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.data import pipeline, relabelled, sources
from vit_jax.errors import UserError
from vit_jax.evaluators import fewshot, frozen, registry
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators.context import Context, Devices, Split
from vit_jax.evaluators.evaluator import Evaluator, SumEvaluator
from vit_jax.evaluators.metric import Metric
from vit_jax.files import read_json
from vit_jax.objectives import losses
from vit_jax.options import Options
from vit_jax.processes import consensus
from vit_jax.training.program import Program


@dataclasses.dataclass(frozen=True)
class Named:
    """An evaluator of a run besides the main one.

    Attributes:
      name: before the names of its metrics in metrics.jsonl.
      evaluator: what measures.
      every: steps from one evaluation to the next, 0: those of the main evaluator.
    """

    name: str
    evaluator: Evaluator
    every: int = 0

    def described(self) -> dict[str, Metric]:
        """Its metrics by their names in metrics.jsonl."""
        return metric_lib.described(self.name, self.evaluator.metrics)


def evaluators(
    program: Program, train: sources.Source, test: sources.Source, settings: Mapping[str, Any]
) -> tuple[Named, ...]:
    """All evaluators that `config.evals` asks for, with their data opened.

    Args:
      program: whose model they score.
      train, test: the splits of the run, for those that the config does not name.
      settings: arguments of pipeline.eval_batches, besides the source.

    Raises UserError when an evaluator or its data cannot be used; from an evaluator when labels
    that are known only then do not suffice.
    """
    config = program.config
    found = []
    if config.evals.fewshot.shots:
        found.append(Named(metric_lib.FEWSHOT, _few_shot(program, train, test, settings)))
    for name in config_lib.evaluator_names(config):
        found.append(_of_section(name, program, train, test, settings))
    return tuple(found)


def _of_section(name, program, train, test, settings):
    """The evaluator of the section evals.NAME."""
    section = program.config.evals[name]
    field = f'evals.{name}'
    given = field, section, program.config, train, test

    def open_test():
        return _batched(*_open_test(*given), settings)

    def open_pair():
        learned, scored = _open_pair(*given)
        return _batched(*learned, settings), _batched(*scored, settings)

    options = Options(f'{field}.options', section.options)
    context = _context(field, program, train.class_names, options, open_test, open_pair)
    made = registry.build(section.type, f'{field}.type', context)
    if isinstance(made, SumEvaluator):
        _require_traceable(made, program, context.test.source, field)
    return Named(name, context.evaluator(made), section.every)


def _context(name, program, class_names, options, open_test, open_pair):
    objective = program.objective
    return Context(
        name=name,
        options=options,
        class_names=class_names,
        encoder=objective.encoder,
        encoder_params=objective.encoder_params,
        loss=losses.make_evaluation_loss(program.config.loss.name),
        devices=Devices(program.mesh, objective.encoder.backend, program.eval_parts),
        open_test=open_test,
        open_pair=open_pair,
    )


def _batched(source, where, settings):
    return Split(source, pipeline.eval_batches(source, **settings), where)


def _require_traceable(evaluator, program, source, field):
    """Raises UserError if the sums cannot be traced: now, and not after many steps."""
    batch = dict(program.abstract_batch)
    size = program.config.batch_size
    if source.multi_label:
        shape = (size, len(source.class_names))
        batch['label'] = jax.ShapeDtypeStruct(shape, jnp.float32)
    else:
        batch['label'] = jax.ShapeDtypeStruct((size,), jnp.int32)
    try:
        jax.eval_shape(evaluator.sums, program.abstract_state.params, batch)
    except UserError:
        raise
    except Exception as error:  # the function is a program of the user's: it may raise anything
        raise UserError(
            f'{field}: its sums cannot be computed ({type(error).__name__}: {error}).'
        ) from error


def _open_test(field, section, config, train, test):
    """(source, name) of the split that an evaluator scores, with the labels of the run."""
    dataset = config.dataset
    split = section.split or dataset.eval_split
    if section.dataset and not section.split:
        raise UserError(f'{field}.dataset is {section.dataset!r}: add {field}.split, its split.')
    if section.dataset or section.split:
        name = section.dataset or dataset.name
        label = '' if section.dataset else dataset.label
        try:
            test = sources.open_source(
                name, split, dataset.data_dir, train.class_names, label, dataset.stratify
            )
        except UserError as error:
            raise type(error)(
                f'{field} scores {split} of {name}: {str(error).rstrip(".")}.'
            ) from error
        if len(test.class_names) != len(train.class_names):
            raise UserError(
                f'{field}.dataset {name!r} has {len(test.class_names)} classes and the run has '
                f'{len(train.class_names)}: expected the same. Frozen features of other classes: '
                f'--config.{field}.type=knn, linear_probe or fewshot.'
            )
    if section.labels:
        try:
            lists = read_json(section.labels, list)
            test = relabelled.relabelled(test, lists, section.labels)
        except UserError as error:
            raise UserError(f'{field}.labels: {error}') from error
    consensus.check_equal(f'the data of {field}', {'images': test.num_examples})
    return test, split


def _open_pair(field, section, config, train, test):
    """Two (source, name): of the split that frozen features learn from, and of the scored one."""
    if section.labels:
        raise UserError(
            f'{field}.labels is {section.labels!r}, and {section.type} classifies frozen features '
            'by labels of its own data: leave it empty.'
        )
    train, test, where = open_data(
        section.dataset, section.train_split, section.split, config.dataset, train, test, field
    )
    return (train, where), (test, section.split or config.dataset.eval_split)


def _few_shot(program, train, test, settings):
    """The evaluator of the section evals.fewshot."""
    config = program.config.evals.fewshot

    def open_pair():
        learned, scored, where = open_data(
            config.dataset,
            config.train_split,
            config.test_split,
            program.config.dataset,
            train,
            test,
        )
        return _batched(learned, where, settings), _batched(scored, where, settings)

    options = Options('evals.fewshot', '')
    context = _context('evals.fewshot', program, train.class_names, options, None, open_pair)
    return frozen.few_shot_of(context, config.shots, config.seeds, config.l2, config.representation)


def open_data(
    name: str,
    train_split: str,
    test_split: str,
    dataset: ConfigDict,
    train: sources.Source,
    test: sources.Source,
    field: str = 'evals.fewshot',
) -> tuple[sources.Source, sources.Source, str]:
    """The splits that frozen features learn from and are scored on, and the name of the first.

    Args:
      name, train_split, test_split: of the evaluator; '' for those of the run.
      dataset: that section of the run.
      train, test: the splits of the run.
      field: the section of the evaluator, for messages.
    """
    tested = 'test_split' if field == 'evals.fewshot' else 'split'
    if name and not (train_split and test_split):
        raise UserError(
            f'{field}.dataset is {name!r}: add {field}.train_split and {field}.{tested}, its '
            'splits.'
        )
    has_own_data = bool(name)
    has_own_training = has_own_data or bool(train_split)
    has_own_test = has_own_data or bool(test_split)
    train_split = train_split or dataset.train_split
    test_split = test_split or dataset.eval_split
    label = '' if has_own_data else dataset.label
    name = name or dataset.name
    opened = functools.partial(
        sources.open_source,
        name,
        data_dir=dataset.data_dir,
        label=label,
        stratify=dataset.stratify,
    )
    try:
        if sources.shared_split(train_split, test_split, opened):
            raise UserError(
                f'it would learn from {train_split} and be scored on {test_split}, '
                f'which have images in common: set {field}.train_split or '
                f'{field}.{tested}.'
            )
        if has_own_training:
            names = None if has_own_data else train.class_names
            train = opened(train_split, class_names=names)
        if has_own_test:
            test = opened(test_split, class_names=train.class_names)
    except UserError as error:
        reason = str(error).rstrip('.')
        message = f'{field} needs {name}: {reason}.'
        if field == 'evals.fewshot':
            message = (
                f'few-shot needs {name} ({field}): {reason}. '
                'Without few-shot: --config.evals.fewshot.shots='
            )
        raise type(error)(message) from error
    fewshot.check_single_label(train, name)
    consensus.check_equal(
        f'the data of {field}',
        {'examples': train.num_examples, 'tested images': test.num_examples},
    )
    return train, test, f'{name}, {train_split},'


def absolute_paths(config: ConfigDict) -> dict[str, str]:
    """Absolute paths of data sets and labels of evaluators, by dotted field.

    Elsewhere the same name may be of other images.
    """
    paths = {}
    for name in ('fewshot', *config_lib.evaluator_names(config)):
        section = config.evals[name]
        path = os.path.expanduser(section.dataset)
        if section.dataset != 'digits' and os.path.isdir(path):
            paths[f'evals.{name}.dataset'] = os.path.abspath(path)
        if name != 'fewshot' and section.labels:
            labels = os.path.expanduser(section.labels)
            paths[f'evals.{name}.labels'] = os.path.abspath(labels)
    return paths
