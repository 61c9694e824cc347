"""Few-shot accuracy of the frozen features of weights (ViT section 4.1)."""

import functools
import logging
from typing import Any

import flax.linen as nn
from jaxtyping import PyTree

from vit_jax import fields
from vit_jax.errors import UserError, check_at_least, counted
from vit_jax.evaluators import fewshot, frozen
from vit_jax.evaluators.context import Split
from vit_jax.evaluators.evaluator import never
from vit_jax.models import representation
from vit_jax.parallel import feeding
from vit_jax.scoring import split
from vit_jax.weights import Weights

log = logging.getLogger(__name__)


def score(
    loaded: Weights,
    model: nn.Module,
    params: PyTree,
    dataset: dict[str, Any],
    *,
    batch_size: int,
    shots: str,
    train_split: str | None = None,
    l2: str = '1024',
    seeds: int = 3,
    name: str = 'pre_logits',
) -> dict[str, Any]:
    """Few-shot accuracy on `dataset`, whose eval_split is scored.

    Args:
      dataset: from split.dataset_of.
      shots, l2: '1,5,10', the values that are tried.
      train_split: where examples are drawn; None: that of `dataset`, and its subset.
      name: one of representation.NAMES.

    Returns `dataset`, both splits, `representation`, its size `num_features`, the numbers of
    images `num_train` and `num_test`, `broken`, and the rows of fewshot.compare as `fewshot`.
    """
    from vit_jax.data import pipeline  # imports TensorFlow

    counts = numbers('--fewshot', shots, fields.whole(1))
    strengths = numbers('--fewshot_l2', l2, fields.number(least=1e-6, most=1e12))
    check_at_least('--fewshot_seeds', seeds, 1)
    representation.check(model, name)
    mesh, subset = split.make_mesh(batch_size), '' if train_split else dataset['subset']
    train_split = train_split or dataset['train_split']
    train, test = open_sources(dataset, train_split, subset)
    classes, where = train.class_names, f'{dataset["name"]}, {train_split},'
    if train.labels is not None:  # now, and not after the work
        fewshot.check_examples(train.labels, classes, counts, where)
    settings = split.batch_settings(loaded, mesh, batch_size, dataset['files_at_once'])
    splits = [
        Split(source, pipeline.eval_batches(source, **settings), name_of_split)
        for source, name_of_split in ((train, train_split), (test, dataset['eval_split']))
    ]
    log.info('features of %s', counted(train.num_examples + test.num_examples, 'image'))
    devices = split.devices(model, mesh, batch_size, loaded.image_size())
    extract = frozen.extractor(model, name, splits, devices)
    found = extract(feeding.replicate(params, mesh), never)
    assert found is not None  # nothing interrupts it
    learned, scored = found
    broken = [path for each in splits for path in split.broken(each.batches)]
    fewshot.check_examples(learned.labels, classes, counts, where)
    rows = list(fewshot.compare(learned, scored, len(classes), counts, seeds, strengths))
    return {
        'dataset': dataset['name'],
        'train_split': train_split,
        'split': dataset['eval_split'],
        'representation': name,
        'num_features': learned.values.shape[1],
        'num_train': len(learned.labels),
        'num_test': len(scored.labels),
        'broken': broken,
        'fewshot': rows,
    }


def open_sources(dataset: dict[str, Any], train_split: str, subset: str) -> tuple[Any, Any]:
    """Where examples are drawn, and what is scored; UserError where they share some."""
    from vit_jax.data import sources, subsets  # imports TensorFlow

    test_split = dataset['eval_split']
    opened = functools.partial(sources.open_split, dataset)
    if sources.shared_split(train_split, test_split, opened):
        raise UserError(
            f'--fewshot_split {train_split} and --split {test_split} have images in '
            'common: expected some to learn from and others to be scored on.'
        )
    train = subsets.subset(opened(train_split), subset, train_split)
    test = opened(test_split, train.class_names)
    fewshot.check_single_label(train, dataset['name'])
    split.check_equal_data(train, test)
    return train, test


def numbers(option: str, text: str, each: fields.Values) -> tuple:
    """The numbers in '1,5,10'; UserError if there are none, or one is not among the values."""
    several = fields.several(each, f'{each.words}; or several, with commas between them')
    found = fields.read(option, several, text)
    if not found:
        raise UserError(f'{option} is {text!r}: expected {several.words}.')
    return found


def table(result: dict) -> str:
    """The result of `score` as a table."""
    broken = f', {len(result["broken"])} broken left out' if result['broken'] else ''
    draws = len(result['fewshot'][0]['accuracies'])
    spread = f', mean ± standard deviation of {draws} draws' if draws > 1 else ''
    return '\n'.join(
        [
            fewshot.table(result['fewshot']),
            (
                f'accuracy in %{spread}, of '
                f'{result["num_features"]} features ({result["representation"]}) of '
                f'{counted(result["num_train"], "image")} of {result["dataset"]}, '
                f'{result["train_split"]}, on '
                f'{result["num_test"]} of {result["split"]}{broken}'
            ),
        ]
    )
