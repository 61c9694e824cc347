"""Few-shot accuracy of the model of a run, as config.evals.fewshot says."""

import functools
from collections.abc import Callable, Mapping

from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError
from vit_jax.evaluators import features, fewshot
from vit_jax.models import representation
from vit_jax.parallel import feeding, sharding
from vit_jax.processes import consensus
from vit_jax.training.program import Program

# (params, interrupted) -> the values of fewshot.metrics, None if interrupted.
Evaluator = Callable[[PyTree, Callable[[], bool]], dict[str, float] | None]


def evaluator(
    program: Program, train: sources.Source, test: sources.Source, settings: Mapping
) -> Evaluator | None:
    """What measures it after any step; None where the config asks for none.

    Every process gathers the features of all images and computes the same.

    Args:
      train, test: the splits of the run, for those that the config does not name.
      settings: arguments of pipeline.eval_batches, besides the source.

    Raises UserError when the data cannot be used, or the model has no such representation; from
    the evaluator when labels that are known only then do not suffice.
    """
    config = program.config.evals.fewshot
    if not config.shots:
        return None
    representation.check(program.objective.encoder, config.representation)
    train, test, where = open_data(config, program.config.dataset, train, test)
    if train.labels is not None:
        fewshot.check_examples(train.labels, train.class_names, config.shots, where)
    step = program.objective.encoder.backend.jit(
        functools.partial(
            features.step,
            model=program.objective.encoder,
            name=config.representation,
            accum_steps=program.eval_parts,
        ),
        out_shardings=sharding.replicated(program.mesh),
    )
    splits = [pipeline.eval_batches(source, **settings) for source in (train, test)]

    def evaluate(params, interrupted):
        found = []
        for batches in splits:
            with sharding.on_mesh(program.mesh):
                found.append(
                    features.extract(
                        step,
                        program.objective.encoder_params(params),
                        feeding.feed(batches, program.mesh),
                        interrupted,
                    )
                )
            if found[-1] is None:
                return None
        fewshot.check_examples(found[0].labels, train.class_names, config.shots, where)
        return fewshot.metrics(
            *found, len(train.class_names), config.shots, config.seeds, config.l2
        )

    return evaluate


def open_data(
    config: ConfigDict, dataset: ConfigDict, train: sources.Source, test: sources.Source
) -> tuple[sources.Source, sources.Source, str]:
    """The splits that few-shot learns from and is scored on, and the name of the first.

    `config` is evals.fewshot and `dataset` that section of the run.
    """
    train_split = config.train_split or dataset.train_split
    test_split = config.test_split or dataset.eval_split
    if config.dataset and not (config.train_split and config.test_split):
        raise UserError(
            f'evals.fewshot.dataset is {config.dataset!r}: add '
            'evals.fewshot.train_split and evals.fewshot.test_split, its splits.'
        )
    name, label = (config.dataset, '') if config.dataset else (dataset.name, dataset.label)
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
                'which have images in common: set evals.fewshot.train_split or '
                'evals.fewshot.test_split.'
            )
        if config.dataset or config.train_split:
            train = opened(train_split, class_names=None if config.dataset else train.class_names)
        if config.dataset or config.test_split:
            test = opened(test_split, class_names=train.class_names)
    except UserError as error:
        raise type(error)(
            f'few-shot needs {name} (evals.fewshot): {str(error).rstrip(".")}. '
            'Without few-shot: --config.evals.fewshot.shots='
        ) from error
    fewshot.check_single_label(train, name)
    consensus.check_equal(
        'the few-shot data', {'examples': train.num_examples, 'tested images': test.num_examples}
    )
    return train, test, f'{name}, {train_split},'
