"""Predictions of a model on the split that scored its run: numbers and pictures."""

import os
import time
from typing import Any

import jax
import numpy as np

from vit_jax.data import pipeline
from vit_jax.errors import Inapplicable, UserError
from vit_jax.evaluators import classification
from vit_jax.evaluators.calibration import calibration
from vit_jax.evaluators.metric import MAIN
from vit_jax.reporting import pictures
from vit_jax.reporting.data import names_of
from vit_jax.reporting.model import Model
from vit_jax.scoring import classes as scoring
from vit_jax.scoring import split

BATCH = 64  # number of images of a step
SHOWN = 24  # number of images of a gallery
SIDE = 112  # pixels of the longer side of these images


def evaluate(model: Model, most: int, seconds: float) -> dict[str, Any]:
    """Evaluates the first images of the split.

    Args:
      model: the model of the run.
      most: largest number of images.
      seconds: evaluation stops after this time.

    Returns:
      `split`; `num_images`, the number of evaluated images; `of`, the number of all images;
      `metrics` as a run logs them; `classes` and `confusion` (not for images with several labels)
      from scoring.classes.by_class; `calibration`; `several_labels`; and two galleries, `mistakes`,
      the most confident first, and `hits`, the least confident first. Their examples have `image`,
      `predicted`, `confidence`, `label`, `label_confidence`, `path` and `name`.

    Raises:
      UserError: if the run has no classes, or its data cannot be opened.
    """
    if not model.weights.num_classes:
        raise Inapplicable(
            'The run predicts masked patches and no classes: fine-tune from it '
            '(configs/finetune.py) and see the report of that run.'
        )
    loss = model.weights.loss or 'softmax'
    source = split.open_labelled_source(model.dataset, model.weights, None, None)
    thumbnails: dict[int, str] = {}
    totals = _totals(model, source, loss, most, seconds, thumbnails)
    rows = totals['rows']
    if not len(rows['index']):
        raise UserError(
            f'none of the images of {model.dataset["eval_split"]} can be evaluated.',
            kind='unreadable',
        )
    if loss == 'sigmoid':
        probabilities = np.asarray(jax.nn.sigmoid(rows['logits']))
    else:
        probabilities = np.asarray(jax.nn.softmax(rows['logits']))
    if rows['label'].ndim == 2 and loss == 'softmax':
        # Average precision compares images, so their logits need a common scale.
        rows['logits'] = np.asarray(jax.nn.log_softmax(rows['logits']))

    def gallery(numbers):
        return [
            _example(rows, k, probabilities, source, thumbnails[int(rows['index'][k])])
            for k in numbers
        ]

    order = np.argsort(-rows['confidence'], kind='stable')
    is_right = rows['right'][order]
    return {
        'split': model.dataset['eval_split'],
        'num_images': len(order),
        'of': source.num_examples,
        'metrics': {
            f'{MAIN}/{name}': value for name, value in classification.metrics(totals).items()
        },
        'calibration': calibration(rows['confidence'], rows['right']),
        **scoring.by_class(rows, source.class_names),
        'several_labels': source.multi_label,
        'mistakes': gallery(order[~is_right][:SHOWN]),
        'hits': gallery(order[is_right][::-1][:SHOWN]),
    }


def _totals(model, source, loss, most, seconds, thumbnails):
    """Returns the sums and rows of an evaluation; fills `thumbnails`, data URIs by index."""
    batch_size = model.batch_size(BATCH)
    mesh = split.make_mesh(batch_size)
    settings = split.batch_settings(model.weights, mesh, batch_size, model.dataset['files_at_once'])
    batches = pipeline.eval_batches(source, with_index=True, **settings)
    return scoring.totals_in_detail(
        model.module,
        model.params,
        loss,
        split.devices(model.module, mesh, batch_size, model.weights.image_size()),
        _limited(batches, model, most, seconds, thumbnails),
        source.multi_label,
        with_logits=True,
    )


def _example(rows, k, probabilities, source, thumbnail):
    """Returns row k of an evaluation as the example of a gallery."""
    label = rows['label'][k]
    if label.ndim:
        label_confidence = probabilities[k][label > 0].max(initial=0)
    else:
        label_confidence = probabilities[k, label]
    path = source.name_of(int(rows['index'][k]))
    return {
        'image': thumbnail,
        'predicted': source.class_names[rows['predicted'][k]],
        'confidence': float(rows['confidence'][k]),
        'label': names_of(label, source.class_names),
        'label_confidence': float(label_confidence),
        'path': path,
        'name': os.path.basename(path),
    }


def _limited(batches, model, most, seconds, thumbnails):
    """Yields batches until enough images are read or the time is over.

    It fills `thumbnails`, which take less memory than the images.
    """
    begin = time.monotonic()
    for batch in batches:
        mask = np.asarray(batch['mask']) > 0
        mask &= np.cumsum(mask) <= most - len(thumbnails)
        yield batch | {'mask': mask}
        images = model.pixels(batch['image'][mask])
        for index, image in zip(batch['index'][mask], images, strict=True):
            thumbnails[int(index)] = pictures.uri(pictures.thumbnail(image, SIDE))
        if len(thumbnails) >= most or time.monotonic() - begin > seconds:
            return
