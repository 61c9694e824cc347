"""Accuracy of ONNX files on a split, image by image as a user runs them."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import counted
from vit_jax.scoring import split
from vit_jax.weights import Weights, description, export

log = logging.getLogger(__name__)


def accuracies(
    paths: Sequence[str], weights: Weights, dataset: dict[str, Any]
) -> tuple[list[float], int]:
    """The accuracy of each file, and the number of images.

    Images are prepared as the weights state. An image with several labels is right if the most
    probable class is one of them.

    Args:
      paths: ONNX files from `images` to `logits`.
      weights: the weights that the files were made from.
      dataset: the section `dataset` from split.dataset_of; its eval_split is scored.

    Raises:
      UserError: if the split cannot be scored.
    """
    from vit_jax.data import pipeline  # imports TensorFlow

    source = split.open_labelled_source(dataset, weights, labels=None, mapping=None)
    # One image at a time: int8 programs quantise the values of a batch together.
    batches = pipeline.eval_batches(
        source,
        batch_size=1,
        image_size=weights.image_size(),
        preprocess=description.complete_preprocess(weights),
        files_at_once=dataset['files_at_once'],
        max_broken_fraction=1.0,
    )
    sessions = [export.session(path) for path in paths]
    num_right = np.zeros(len(paths), int)
    num_images = 0
    for batch in batches:
        if not batch['mask'][0]:
            continue
        num_images += 1
        for number, session in enumerate(sessions):
            (logits,) = session.run(['logits'], {'images': np.asarray(batch['image'])})
            num_right[number] += _is_right(logits[0], batch['label'][0])
    broken = split.broken(batches)
    if broken:
        log.warning('Left out %s, first %s', counted(len(broken), 'broken image'), broken[0])
    return (num_right / num_images).tolist(), num_images


def _is_right(logits, label):
    """Whether the most probable class is the label, or one of several labels."""
    predicted = logits.argmax()
    if np.ndim(label):
        return bool(label[predicted])
    return predicted == label
