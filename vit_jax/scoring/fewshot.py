"""Few-shot accuracy of the frozen features of weights (ViT section 4.1)."""

import functools
import logging
from typing import Any

from vit_jax import fields
from vit_jax.errors import UserError, check_at_least, counted
from vit_jax.evaluators import fewshot, frozen
from vit_jax.evaluators.context import Split
from vit_jax.evaluators.evaluator import never
from vit_jax.models import representation
from vit_jax.parallel import feeding
from vit_jax.scoring import split
from vit_jax.weights import Loaded

log = logging.getLogger(__name__)


def score(
    loaded: Loaded,
    dataset: dict[str, Any],
    *,
    batch_size: int,
    shots: str,
    train_split: str | None = None,
    l2: str = '1024',
    seeds: int = 3,
    name: str = 'pre_logits',
) -> dict[str, Any]:
    """Few-shot accuracy of weights on the eval_split of `dataset`.

    Args:
      loaded: the weights and their model.
      dataset: the section `dataset` from split.dataset_of.
      batch_size: the batch size of all devices together.
      shots: numbers of examples per class, as in '1,5,10'.
      train_split: split of the examples; None for the train_split of `dataset`, and its subset.
      l2: regularisations of least squares, as in '1,1024'.
      seeds: number of draws of the examples.
      name: the name of the representation, one of representation.NAMES.

    Returns:
      `dataset`, `train_split`, `split`, `representation`, its size `num_features`, the numbers of
      images `num_train` and `num_test`, `broken` (names of broken images), and `fewshot`, the rows
      of fewshot.compare.

    Raises:
      UserError: if an argument is impossible, or the data cannot be used.
    """
    shot_counts = numbers('--fewshot', shots, fields.whole(1))
    strengths = numbers('--fewshot_l2', l2, fields.number(least=1e-6, most=1e12))
    check_at_least('--fewshot_seeds', seeds, 1)
    representation.check(loaded.module, name)
    mesh = split.make_mesh(batch_size)
    train, test = _open_splits(loaded, dataset, train_split, mesh, batch_size)
    class_names = train.source.class_names
    if train.source.labels is not None:  # before the features are computed
        fewshot.check_examples(train.source.labels, class_names, shot_counts, train.where)
    num_images = train.source.num_examples + test.source.num_examples
    log.info('features of %s', counted(num_images, 'image'))
    devices = split.devices(loaded.module, mesh, batch_size, loaded.weights.image_size())
    extract = frozen.extractor(loaded.module, name, [train, test], devices)
    features = extract(feeding.replicate(loaded.params, mesh), never)
    assert features is not None  # nothing interrupts it
    train_features, test_features = features
    broken = split.broken_of_splits([train, test])
    fewshot.check_examples(train_features.labels, class_names, shot_counts, train.where)
    num_classes = len(class_names)
    rows = fewshot.compare(
        train_features, test_features, num_classes, shot_counts, seeds, strengths
    )
    return {
        'dataset': dataset['name'],
        'train_split': train_split or dataset['train_split'],
        'split': dataset['eval_split'],
        'representation': name,
        'num_features': train_features.values.shape[1],
        'num_train': len(train_features.labels),
        'num_test': len(test_features.labels),
        'broken': broken,
        'fewshot': list(rows),
    }


def _open_splits(loaded, dataset, train_split, mesh, batch_size):
    """The split to learn from and the split to score, with their batches."""
    from vit_jax.data import pipeline  # imports TensorFlow

    subset = '' if train_split else dataset['subset']
    train_split = train_split or dataset['train_split']
    train, test = open_sources(dataset, train_split, subset)
    settings = split.batch_settings(loaded.weights, mesh, batch_size, dataset['files_at_once'])
    where = f'{dataset["name"]}, {train_split},'
    return (
        Split(train, pipeline.eval_batches(train, **settings), where),
        Split(test, pipeline.eval_batches(test, **settings), dataset['eval_split']),
    )


def open_sources(dataset: dict[str, Any], train_split: str, subset: str) -> tuple[Any, Any]:
    """Opens the split to learn from and the split to score.

    Raises:
      UserError: if the splits share images, or images have several labels.
    """
    from vit_jax.data import sources, subsets  # imports TensorFlow

    test_split = dataset['eval_split']
    opened = functools.partial(sources.open_split, dataset)
    if sources.shared_split(train_split, test_split, opened):
        raise UserError(
            f'--fewshot_split {train_split} and --split {test_split} have images in '
            'common: expected other images to learn from than to score.',
            kind='value',
            field='--fewshot_split',
            value=train_split,
        )
    train = subsets.subset(opened(train_split), subset, train_split)
    test = opened(test_split, train.class_names)
    fewshot.check_single_label(train, dataset['name'])
    split.check_equal_data(train, test)
    return train, test


def numbers(option: str, text: str, each: fields.Values) -> tuple:
    """Parses the numbers in a text such as '1,5,10'.

    Args:
      option: name of the option, for messages.
      text: its value.
      each: the possible values.

    Raises:
      UserError: if there are no numbers, or one of them is impossible.
    """
    several = fields.several(each, f'{each.words}; or several, with commas between them')
    values = fields.read(option, several, text)
    if not values:
        raise UserError(
            f'{option} is {text!r}: expected {several.words}.',
            kind='value',
            field=option,
            value=text,
        )
    return values


def table(result: dict) -> str:
    """The result of `score` as a table."""
    spread = ''
    num_draws = len(result['fewshot'][0]['accuracies'])
    if num_draws > 1:
        spread = f', mean ± standard deviation of {num_draws} draws'
    broken = ''
    if result['broken']:
        broken = f', {len(result["broken"])} broken left out'
    about = (
        f'accuracy in %{spread}, of {result["num_features"]} features '
        f'({result["representation"]}) of {counted(result["num_train"], "image")} of '
        f'{result["dataset"]}, {result["train_split"]}, on {result["num_test"]} of '
        f'{result["split"]}{broken}'
    )
    return f'{fewshot.table(result["fewshot"])}\n{about}'
