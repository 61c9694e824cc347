"""What a model says of the images of the split that scored its run: numbers, and pictures."""

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

BATCH, SHOWN, SIDE = 64, 24, 112  # images of a step and of a gallery, pixels of their longer side


def evaluate(model: Model, most: int, seconds: float) -> dict[str, Any]:
    """Evaluates the first `most` images of the split, or those that `seconds` suffice for.

    Returns `split`, `num_images` and `of` how many, `metrics` as a run logs them, `classes` and
    `confusion` (without it, of several labels) as scoring.classes.by_class, `calibration`; and
    `mistakes`, the most confident first, and `hits`, the least confident first, each with
    `image`, `predicted` and `confidence`, `label` and what the model gives it, `path` and `name`.

    Raises UserError where the run has no classes, or its data cannot be opened.
    """
    if not model.weights.num_classes:
        raise Inapplicable(
            'The run predicts hidden patches and no classes: fine-tune from it '
            '(configs/finetune.py) and see the report of that run.'
        )
    batch_size = model.batch_size(BATCH)
    mesh = split.make_mesh(batch_size)
    source = split.open_labelled_source(model.dataset, model.weights, None, None)
    batches = pipeline.eval_batches(
        source,
        with_index=True,
        **split.batch_settings(model.weights, mesh, batch_size, model.dataset['files_at_once']),
    )
    thumbnails: dict[int, str] = {}  # as the page has them, which takes less memory
    loss = model.weights.loss or 'softmax'
    totals = scoring.totals_in_detail(
        model.module,
        model.params,
        loss,
        split.devices(model.module, mesh, batch_size, model.weights.image_size()),
        _limited(batches, model, most, seconds, thumbnails),
        source.multi_label,
        with_logits=True,
    )
    rows, names = totals['rows'], source.class_names
    if not len(rows['index']):
        raise UserError(f'none of the images of {model.dataset["eval_split"]} can be evaluated.')
    values = np.asarray((jax.nn.sigmoid if loss == 'sigmoid' else jax.nn.softmax)(rows['logits']))
    if rows['label'].ndim == 2 and loss == 'softmax':  # compared between images
        rows['logits'] = np.asarray(jax.nn.log_softmax(rows['logits']))

    def example(k):
        label = rows['label'][k]
        return {
            'image': thumbnails[int(rows['index'][k])],
            'predicted': names[rows['predicted'][k]],
            'confidence': float(rows['confidence'][k]),
            'label': names_of(label, names),
            'label_confidence': float(
                values[k][label > 0].max(initial=0) if label.ndim else values[k, label]
            ),
            'path': (path := source.name_of(int(rows['index'][k]))),
            'name': os.path.basename(path),
        }

    order = np.argsort(-rows['confidence'], kind='stable')
    right = rows['right'][order]
    return {
        'split': model.dataset['eval_split'],
        'num_images': len(order),
        'of': source.num_examples,
        'metrics': {
            f'{MAIN}/{name}': value for name, value in classification.metrics(totals).items()
        },
        'calibration': calibration(rows['confidence'], rows['right']),
        **scoring.by_class(rows, names),
        'several_labels': source.multi_label,
        'mistakes': [example(k) for k in order[~right][:SHOWN]],
        'hits': [example(k) for k in order[right][::-1][:SHOWN]],
    }


def _limited(batches, model, most, seconds, thumbnails):
    """Yields batches until enough images are read, whose thumbnails it keeps by index."""
    begin = time.monotonic()
    for batch in batches:
        mask = np.asarray(batch['mask']) > 0
        mask &= np.cumsum(mask) <= most - len(thumbnails)
        yield batch | {'mask': mask}
        for index, image in zip(
            batch['index'][mask], model.pixels(batch['image'][mask]), strict=True
        ):
            thumbnails[int(index)] = pictures.uri(pictures.thumbnail(image, SIDE))
        if len(thumbnails) >= most or time.monotonic() - begin > seconds:
            return
