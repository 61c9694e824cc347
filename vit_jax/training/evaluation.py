"""The additional evaluators of a run, as config.evals names them, and few-shot accuracy."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

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
    """An evaluator of a run, apart from the main one.

    Attributes:
      name: prefix of its metrics in metrics.jsonl.
      evaluator: computes the metrics.
      every: steps between evaluations; 0 for the period of the main evaluator.
    """

    name: str
    evaluator: Evaluator
    every: int = 0

    def described(self) -> dict[str, Metric]:
        """The metrics of the evaluator by their names in metrics.jsonl."""
        return metric_lib.described(self.name, self.evaluator.metrics)


def evaluators(
    program: Program, train: sources.Source, test: sources.Source, settings: Mapping[str, Any]
) -> tuple[Named, ...]:
    """All evaluators of `config.evals`, with their data opened.

    Args:
      program: the program whose model is scored.
      train: the training split of the run, for evaluators whose config names no other.
      test: the evaluation split of the run, for evaluators whose config names no other.
      settings: arguments of pipeline.eval_batches, apart from the source.

    Raises:
      UserError: if an evaluator or its data cannot be used. If labels are only read together with
        the images, the evaluator raises it later for a class with too few images.
    """
    config = program.config
    named = []
    if config.evals.fewshot.shots:
        named.append(Named(metric_lib.FEWSHOT, _few_shot(program, train, test, settings)))
    for name in config_lib.evaluator_names(config.evals):
        named.append(_of_section(name, program, train, test, settings))
    return tuple(named)


def _of_section(name, program, train, test, settings):
    """The evaluator of the section evals.NAME."""
    config = program.config
    section = config.evals[name]
    field = f'evals.{name}'

    def open_test():
        source, where = _open_test(field, section, config, train, test)
        return _batched(source, where, settings)

    def open_pair():
        pair = _open_pair(field, section, config, train, test)
        return _batched_pair(pair, settings)

    options = Options(f'{field}.options', section.options)
    context = _context(field, program, train.class_names, options, open_test, open_pair)
    evaluator = registry.build(section.type, f'{field}.type', context)
    if isinstance(evaluator, SumEvaluator):
        _require_traceable(evaluator, program, context.test.source, field)
    return Named(name, context.evaluator(evaluator), section.every)


def _few_shot(program, train, test, settings):
    """The evaluator of the section evals.fewshot."""
    section = program.config.evals.fewshot

    def open_pair():
        pair = open_data(
            section.dataset,
            section.train_split,
            section.test_split,
            program.config.dataset,
            train,
            test,
        )
        return _batched_pair(pair, settings)

    options = Options('evals.fewshot', '')
    context = _context('evals.fewshot', program, train.class_names, options, None, open_pair)
    return frozen.few_shot_of(
        context, section.shots, section.seeds, section.l2, section.representation
    )


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


def _batched_pair(pair, settings):
    train = _batched(pair.train, pair.train_name, settings)
    test = _batched(pair.test, pair.test_name, settings)
    return train, test


def _require_traceable(evaluator, program, source, field):
    """Raises UserError now, not after many steps, if JAX cannot trace the sums."""
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
    except Exception as error:  # the sums are code of the user and may raise anything
        raise UserError(
            f'{field}: its sums cannot be computed ({type(error).__name__}: {error}).',
            kind='other',
            field=field,
        ) from error


def _open_test(field, section, config, train, test):
    """Returns (source, name) of the split that an evaluator scores, with the labels of the run."""
    dataset = config.dataset
    split = section.split or dataset.eval_split
    if section.dataset and not section.split:
        raise UserError(
            f'{field}.dataset is {section.dataset!r}: add {field}.split, its split.',
            kind='missing',
            field=f'{field}.split',
        )
    if section.dataset or section.split:
        test = _open_scored(field, section, dataset, train)
    if section.labels:
        try:
            lists = read_json(section.labels, list)
            test = relabelled.relabelled(test, lists, section.labels)
        except UserError as error:
            raise UserError(
                f'{field}.labels: {error}',
                kind=error.kind,
                field=f'{field}.labels',
                file=error.file,
                value=error.value,
            ) from error
    consensus.check_equal(f'the data of {field}', {'images': test.num_examples})
    return test, split


def _open_scored(field, section, dataset, train):
    """Opens the split of a section with its own data set or split, with the classes of the run."""
    name = section.dataset or dataset.name
    split = section.split
    label = '' if section.dataset else dataset.label
    try:
        test = sources.open_source(
            name,
            split,
            dataset.data_dir,
            train.class_names,
            label,
            dataset.stratify,
            dataset.heic,
        )
    except UserError as error:
        reason = str(error).rstrip('.')
        raise _explained(error, f'{field} scores {split} of {name}: {reason}.') from error
    if len(test.class_names) != len(train.class_names):
        raise UserError(
            f'{field}.dataset {name!r} has {len(test.class_names)} classes and the run has '
            f'{len(train.class_names)}: expected the same number. To score frozen features on '
            f'other classes, use --config.{field}.type=knn, linear_probe or fewshot.',
            kind='content',
            field=f'{field}.dataset',
            value=name,
        )
    return test


def _explained(error: UserError, message: str) -> UserError:
    """The same error with another message."""
    return type(error)(
        message, kind=error.kind, field=error.field, file=error.file, value=error.value
    )


class Pair(NamedTuple):
    """The splits for a classifier of frozen features, with their names in messages."""

    train: sources.Source
    train_name: str
    test: sources.Source
    test_name: str


def _open_pair(field, section, config, train, test):
    """Opens the splits that the section of a classifier of frozen features names."""
    if section.labels:
        raise UserError(
            f'{field}.labels is {section.labels!r}, and {section.type} classifies frozen features '
            'by the labels of its own data: leave it empty.',
            kind='value',
            field=f'{field}.labels',
            value=section.labels,
        )
    return open_data(
        section.dataset, section.train_split, section.split, config.dataset, train, test, field
    )


def open_data(
    name: str,
    train_split: str,
    test_split: str,
    dataset: ConfigDict,
    train: sources.Source,
    test: sources.Source,
    field: str = 'evals.fewshot',
) -> Pair:
    """Opens the splits that frozen features learn from and are scored on.

    Args:
      name: the data set of the evaluator; '' for the data set of the run.
      train_split: split to learn from; '' for the training split of the run.
      test_split: split to score; '' for the evaluation split of the run.
      dataset: `config.dataset` of the run.
      train: the training split of the run.
      test: the evaluation split of the run.
      field: the section of the evaluator, for messages.

    Raises:
      UserError: if a split cannot be opened, has images with several labels, or shares images with
        the other split.
    """
    test_field = f'{field}.test_split' if field == 'evals.fewshot' else f'{field}.split'
    if name and not (train_split and test_split):
        raise UserError(
            f'{field}.dataset is {name!r}: add {field}.train_split and {test_field}, its splits.',
            kind='missing',
            field=test_field if train_split else f'{field}.train_split',
        )
    has_own_data = bool(name)
    has_own_training = has_own_data or bool(train_split)
    has_own_test = has_own_data or bool(test_split)
    train_split = train_split or dataset.train_split
    test_split = test_split or dataset.eval_split
    name = name or dataset.name
    opened = functools.partial(
        sources.open_source,
        name,
        data_dir=dataset.data_dir,
        label='' if has_own_data else dataset.label,
        stratify=dataset.stratify,
        with_heic=dataset.heic,
    )
    try:
        if sources.shared_split(train_split, test_split, opened):
            raise UserError(
                f'it would learn from {train_split} and be scored on {test_split}, '
                f'which have images in common: set {field}.train_split or {test_field}.',
                kind='value',
                field=test_field,
                value=test_split,
            )
        if has_own_training:
            class_names = None if has_own_data else train.class_names
            train = opened(train_split, class_names=class_names)
        if has_own_test:
            test = opened(test_split, class_names=train.class_names)
    except UserError as error:
        raise _explained(error, _data_problem(field, name, error)) from error
    fewshot.check_single_label(train, name)
    consensus.check_equal(
        f'the data of {field}',
        {'examples': train.num_examples, 'tested images': test.num_examples},
    )
    return Pair(train, f'{name}, {train_split},', test, test_split)


def _data_problem(field, name, error):
    """The message for an error about the data of an evaluator of frozen features."""
    reason = str(error).rstrip('.')
    if field == 'evals.fewshot':
        return (
            f'few-shot needs {name} ({field}): {reason}. '
            'Without few-shot: --config.evals.fewshot.shots='
        )
    return f'{field} needs {name}: {reason}.'


def absolute_paths(evals: ConfigDict) -> dict[str, str]:
    """Absolute paths of data sets and label files of `config.evals`, by dotted field."""
    paths = {}
    for name, section in evals.items():
        path = sources.local_path(section.dataset)
        if path:
            paths[f'evals.{name}.dataset'] = path
        if name != 'fewshot' and section.labels:
            labels = os.path.expanduser(section.labels)
            paths[f'evals.{name}.labels'] = os.path.abspath(labels)
    return paths
