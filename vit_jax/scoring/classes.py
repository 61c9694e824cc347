"""Accuracy, loss and calibration of weights on a split, in total and for every class."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import PyTree

from vit_jax.data import table_cells
from vit_jax.errors import UserError, counted, one_line
from vit_jax.evaluators import average_precision, classification, per_class
from vit_jax.evaluators.calibration import calibration
from vit_jax.evaluators.context import Devices
from vit_jax.evaluators.evaluator import total
from vit_jax.evaluators.metric import MAIN
from vit_jax.files import check_destination, writing
from vit_jax.objectives import losses
from vit_jax.parallel import feeding
from vit_jax.processes import consensus
from vit_jax.scoring import split
from vit_jax.weights import Weights, description

log = logging.getLogger(__name__)


def score(
    loaded: Weights,
    model: nn.Module,
    params: PyTree,
    dataset: dict[str, Any],
    *,
    batch_size: int,
    labels: str | None = None,
    mapping: str | None = None,
    save_to: str | None = None,
    csv_to: str | None = None,
) -> dict[str, Any]:
    """Scores the weights on a split.

    Args:
      dataset: from split.dataset_of.
      labels, mapping: paths of JSON files with other labels, see data/relabelled.py.
      save_to: where `save` writes what the model gives.
      csv_to: where `save_table` writes a row for every image.

    Returns `dataset`, `split`, and `labels` or `mapping` if given; eval/* as a run logs them;
    `classes`, the numbers of each by name; `calibration`; `confusion`, where images have one label:
    for the name of each class the number of its images by the name of the class that was predicted,
    without zeros, and `mean_class_accuracy`, of the classes that have images; `broken`, the names
    of all images that cannot be decoded and are left out.
    """
    from vit_jax.data import pipeline  # imports TensorFlow

    mesh, loss = split.make_mesh(batch_size), loaded.loss or 'softmax'
    if consensus.is_main():  # now, not after the work
        if save_to:
            check_destination(save_to, '.npz')
        if csv_to:
            check_destination(csv_to, '.csv')
    source = split.open_labelled_source(dataset, loaded, labels, mapping)
    batches = pipeline.eval_batches(
        source,
        with_index=True,
        **split.batch_settings(loaded, mesh, batch_size, dataset['files_at_once']),
    )
    devices = split.devices(model, mesh, batch_size, loaded.image_size())
    totals = totals_in_detail(
        model, params, loss, devices, batches, source.multi_label, with_logits=bool(save_to)
    )
    rows = totals['rows']
    given = dict(rows)
    if source.multi_label and loss == 'softmax':  # which is compared between images
        rows['logits'] = np.asarray(jax.nn.log_softmax(rows['logits']))
    result = {
        'dataset': dataset['name'],
        'split': dataset['eval_split'],
        **{k: path for k, path in (('labels', labels), ('mapping', mapping)) if path},
        **{f'{MAIN}/{name}': value for name, value in classification.metrics(totals).items()},
        'broken': split.broken(batches),
        'calibration': calibration(rows['confidence'], rows['right']),
        **by_class(rows, source.class_names),
    }
    if consensus.is_main():
        try:
            if save_to:
                save(save_to, given, source)
            if csv_to:
                save_table(csv_to, given, source)
        except UserError:
            log.info('%s', table(result))  # which took longer than the file
            raise
    return result


def totals_in_detail(
    model: nn.Module,
    params: PyTree,
    loss: str,
    devices: Devices,
    batches: Iterable,
    multi_label: bool,
    with_logits: bool,
) -> dict[str, Any]:
    """Sums over all batches, with the rows of classification.classify_in_detail.

    Args:
      loss: 'softmax' or 'sigmoid'. The loss softmax is that of targets spread evenly over the
        labels of an image.
      devices: where the model computes.
      multi_label, with_logits: of classification.classify_in_detail.
    """
    probabilities = jax.nn.sigmoid if loss == 'sigmoid' else jax.nn.softmax

    def logits(params, batch):
        return model.apply({'params': params}, batch['image'])

    evaluator = classification.classify_in_detail(
        logits, losses.make_evaluation_loss(loss), multi_label, probabilities, with_logits
    )
    placed = feeding.replicate(params, devices.mesh)
    totals = total(devices.jit_sums(evaluator), placed, devices.feed(batches))
    assert totals is not None  # nothing interrupts it
    return totals


def by_class(rows: dict[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """The entries `classes`, `confusion` and `mean_class_accuracy` of the result.

    Names that several classes have, as ImageNet's 'crane', get the number of the class behind them.
    """
    names = description.unique_names(names)
    if rows['label'].ndim == 2:
        precision = average_precision.by_class(rows['logits'], rows['label'])
        return {
            'classes': {
                name: {
                    'average_precision': None if np.isnan(value) else float(value),
                    'num_examples': int(count),
                }
                for name, value, count in zip(names, precision, rows['label'].sum(0), strict=True)
            }
        }
    matrix: dict[str, dict[str, int]] = {name: {} for name in names}
    pairs, counts = np.unique(
        np.stack([rows['label'], rows['predicted']]), axis=1, return_counts=True
    )
    for label, predicted, count in zip(*pairs, counts, strict=True):
        matrix[names[label]][names[predicted]] = int(count)
    totals = {name: sum(row.values()) for name, row in matrix.items()}
    accuracies = {
        name: row.get(name, 0) / totals[name] for name, row in matrix.items() if totals[name]
    }
    classes = {
        name: {'accuracy': accuracies.get(name), 'num_examples': num_examples}
        for name, num_examples in totals.items()
    }
    mean = float(np.mean(list(accuracies.values())))
    return {'classes': classes, 'confusion': matrix, 'mean_class_accuracy': mean}


def save(path: str, rows: dict[str, np.ndarray], source: Any) -> None:
    """Writes logits [images, classes], label, name of every image, and the names of classes."""
    order = np.argsort(rows['index'])
    names = [source.name_of(index) for index in rows['index'][order]]
    with writing(path) as temporary, open(temporary, 'wb') as file:
        np.savez(
            file,
            logits=rows['logits'][order],
            label=rows['label'][order],
            name=np.array(names),
            classes=np.array(source.class_names),
        )
    num_images, num_classes = rows['logits'].shape
    log.info('wrote %s: %s, %d classes', path, counted(num_images, 'image'), num_classes)


def save_table(path: str, rows: dict[str, np.ndarray], source: Any) -> None:
    """Writes a CSV table with path, label, prediction and probability of every image.

    The prediction is the most probable class. Labels of an image with several are joined by
    semicolons. Rows are in the order of `save`.
    """
    order = np.argsort(rows['index'])
    names = description.unique_names(source.class_names)
    table = []
    for number in order:
        label = rows['label'][number]
        if rows['label'].ndim == 2:
            text = ';'.join(names[k] for k in np.flatnonzero(label))
        else:
            text = names[label]
        path_of_image = source.name_of(rows['index'][number])
        prediction = names[rows['predicted'][number]]
        table.append([path_of_image, text, prediction, float(rows['confidence'][number])])
    with writing(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
        table_cells.write(file, ['path', 'label', 'prediction', 'probability'], table)
    log.info('wrote %s: %s', path, counted(len(table), 'image'))


def table(result: dict) -> str:
    """The result as a table, worst class first, with the classes that have no images named."""
    summary = per_class.from_table(result['classes'])
    # With --mapping, the weights have many classes that the data set does not have.
    missing = '' if 'mapping' in result else summary.missing()
    scores = {
        one_line(name): (c.get('accuracy', c.get('average_precision')), c['num_examples'])
        for name, c in result['classes'].items()
    }
    scored = sorted(
        ((score, name, count) for name, (score, count) in scores.items() if score is not None),
        key=lambda item: item[0],
    )
    width = max(map(len, scores))
    lines = [
        f'  {name:<{width}}  {100 * score:6.2f} %  of {count}' for score, name, count in scored
    ]
    broken = f', {len(result["broken"])} broken left out' if result['broken'] else ''
    precision = result.get(f'{MAIN}/{classification.MEAN_AVERAGE_PRECISION.name}')
    error = result['calibration']['expected_error']
    by = ''.join(f', {name} of {result[name]}' for name in ('labels', 'mapping') if name in result)
    numbers = [
        f'accuracy {100 * result["eval/accuracy"]:.2f} %',
        *([f'top-5 {100 * result["eval/accuracy_top5"]:.2f} %'] * (len(scores) >= 10)),
        f'mAP of {summary.count()} {100 * precision:.2f} %'
        if precision is not None
        else f'mean of {summary.count()} {100 * result["mean_class_accuracy"]:.2f} %',
        summary.worst(),
        f'loss {result["eval/loss"]:.4f}',
        *([f'calibration error {100 * error:.2f} %'] if error is not None else []),
    ]
    return '\n'.join(
        [
            *lines,
            *([missing] if missing else []),
            (
                f'{"  ".join(numbers)}  on {counted(result["eval/num_examples"], "image")} of '
                f'{result["dataset"]}, {result["split"]}{by}{broken}'
            ),
        ]
    )
