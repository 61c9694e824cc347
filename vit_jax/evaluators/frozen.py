"""Evaluators that classify frozen features; a config or a command names them."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import PyTree

from vit_jax.errors import UserError, check_choice
from vit_jax.evaluators import features, fewshot, probes
from vit_jax.evaluators.context import Context, Devices, Split
from vit_jax.evaluators.evaluator import Evaluator
from vit_jax.evaluators.features import Features
from vit_jax.evaluators.metric import Metric
from vit_jax.models import representation

ACCURACY = Metric('accuracy', 'percent', 'highest', 'accuracy')


def few_shot(context: Context) -> Evaluator:
    """Accuracy of least squares on a few examples of each class (section 4.1).

    Options: `shots`, numbers with spaces between them (5), `seeds` (3), `l2` (1024) and
    `representation` (pre_logits).

    Raises:
      UserError: if an option has an impossible value, or the data has too few examples.
    """
    options = context.options
    text = options.get_text('shots', '5')
    shots = [int(word) for word in text.split() if word.isdigit()]
    if not shots or len(shots) != len(text.split()) or 0 in shots:
        raise UserError(
            f'{context.name}: shots is {text!r}, expected whole numbers, at least 1, with spaces '
            'between them.',
            kind='value',
            field='shots',
            value=text,
        )
    seeds = options.get_int('seeds', 3)
    l2 = options.get_float('l2', 1024.0)
    return few_shot_of(context, shots, seeds, l2, _representation(context))


def few_shot_of(
    context: Context, shots: Sequence[int], seeds: int, l2: float, name: str
) -> Evaluator:
    """Makes the evaluator `few_shot` with its options as arguments.

    Args:
      context: the context of the evaluator.
      shots: numbers of examples per class.
      seeds: number of draws of the examples.
      l2: regularisation of least squares.
      name: the name of the representation.
    """

    def measure(train, test, num_classes):
        return fewshot.metrics(train, test, num_classes, shots, seeds, l2)

    return _evaluator(context, name, measure, fewshot.metrics_of(shots), shots)


def nearest_neighbours(context: Context) -> Evaluator:
    """Accuracy of the votes of the nearest training images (arXiv 1805.01978).

    Options: `representation` (pre_logits).
    """
    return _of_all_examples(context, probes.nearest_neighbours)


def linear_probe(context: Context) -> Evaluator:
    """Accuracy of a linear classifier that learns from all training images.

    Options: `representation` (pre_logits).
    """
    return _of_all_examples(context, probes.linear_probe)


def _of_all_examples(context, classifier):
    """An evaluator of the accuracy of a classifier in probes.py that learns from all examples."""

    def measure(train, test, num_classes):
        scores = classifier(train, test.values, num_classes)
        return {ACCURACY.name: float(np.mean(scores.argmax(axis=1) == test.labels))}

    return _evaluator(context, _representation(context), measure, [ACCURACY], [1])


def _representation(context):
    name = context.options.get_text('representation', 'pre_logits')
    check_choice(f'{context.name}: representation', name, representation.NAMES)
    return name


def _evaluator(context, name, measure, metrics, shots):
    """An evaluator that extracts the features of both splits and passes them to `measure`."""
    representation.check(context.encoder, name)
    train, test = context.open_pair()
    class_names = train.source.class_names
    if train.source.labels is not None:  # before the features are computed
        fewshot.check_examples(train.source.labels, class_names, shots, train.where)
    extract = extractor(context.encoder, name, (train, test), context.devices)

    def run(params, interrupted):
        split_features = extract(context.encoder_params(params), interrupted)
        if split_features is None:
            return None
        train_features, test_features = split_features
        fewshot.check_examples(train_features.labels, class_names, shots, train.where)
        return measure(train_features, test_features, len(class_names))

    return Evaluator(metrics, run)


def extractor(
    encoder, name: str, splits: Sequence[Split], devices: Devices
) -> Callable[[PyTree, Callable[[], bool]], list[Features] | None]:
    """Returns a function (params, interrupted) -> features of each split, or None if interrupted.

    Every process gets the features of all images.

    Args:
      encoder: the model whose parameters the function takes.
      name: the name of the representation.
      splits: the splits whose features are extracted.
      devices: the devices that compute the features.
    """
    step = devices.jit(
        functools.partial(features.step, model=encoder, name=name, accum_steps=devices.accum_steps)
    )

    def extract(params, interrupted):
        split_features = []
        for split in splits:
            extracted = features.extract(step, params, devices.feed(split.batches), interrupted)
            if extracted is None:
                return None
            split_features.append(extracted)
        return split_features

    return extract
