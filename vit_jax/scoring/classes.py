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
from vit_jax.weights import Loaded, description

log = logging.getLogger(__name__)


def score(
    loaded: Loaded,
    dataset: dict[str, Any],
    *,
    batch_size: int,
    labels: str | None = None,
    mapping: str | None = None,
    save_to: str | None = None,
    csv_to: str | None = None,
) -> dict[str, Any]:
    """Scores weights on a split, in total and for every class.

    Args:
      loaded: the weights and their model.
      dataset: the section `dataset` from split.dataset_of; its eval_split is scored.
      batch_size: the batch size of all devices together.
      labels: path of a JSON file with other labels, see data/relabelled.py.
      mapping: path of a JSON file with other classes, see data/relabelled.py.
      save_to: path for the logits, see `save`; None for no file.
      csv_to: path for the table of images, see `save_table`; None for no file.

    Returns:
      `dataset`, `split`, and `labels` or `mapping` if given; eval/* as a run logs them; `classes`,
      the scores of every class by name; `calibration`; `broken`, the names of images that cannot be
      decoded, which are not scored. If images have one label, also `mean_class_accuracy`, of the
      classes with images, and `confusion`: for each label and each predicted class, by name, the
      number of images if it is not 0.

    Raises:
      UserError: if the split cannot be scored, or a file cannot be written.
    """
    from vit_jax.data import pipeline  # imports TensorFlow

    mesh = split.make_mesh(batch_size)
    loss = loaded.weights.loss or 'softmax'
    _check_destinations(save_to, csv_to)
    source = split.open_labelled_source(dataset, loaded.weights, labels, mapping)
    batches = pipeline.eval_batches(
        source,
        with_index=True,
        **split.batch_settings(loaded.weights, mesh, batch_size, dataset['files_at_once']),
    )
    devices = split.devices(loaded.module, mesh, batch_size, loaded.weights.image_size())
    totals = totals_in_detail(
        loaded.module,
        loaded.params,
        loss,
        devices,
        batches,
        source.multi_label,
        with_logits=bool(save_to),
    )
    rows = totals['rows']
    written_rows = dict(rows)  # with the logits of the model
    if source.multi_label and loss == 'softmax':  # average precision compares images
        rows['logits'] = np.asarray(jax.nn.log_softmax(rows['logits']))
    result: dict[str, Any] = {'dataset': dataset['name'], 'split': dataset['eval_split']}
    files = {'labels': labels, 'mapping': mapping}
    result |= {name: path for name, path in files.items() if path}
    for name, value in classification.metrics(totals).items():
        result[f'{MAIN}/{name}'] = value
    result['broken'] = split.broken(batches)
    result['calibration'] = calibration(rows['confidence'], rows['right'])
    result |= by_class(rows, source.class_names)
    try:
        _write_files(save_to, csv_to, written_rows, source)
    except UserError:
        log.info('%s', table(result))  # first: a failed write must not lose the result
        raise
    return result


def _write_files(save_to, csv_to, rows, source):
    """Writes the files of the command, on process 0."""
    if not consensus.is_main():
        return
    if save_to:
        save(save_to, rows, source)
    if csv_to:
        save_table(csv_to, rows, source)


def _check_destinations(save_to, csv_to):
    """Raises UserError for paths that cannot be written, before the images are scored."""
    if not consensus.is_main():
        return
    if save_to:
        check_destination(save_to, '.npz')
    if csv_to:
        check_destination(csv_to, '.csv')


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
      model: the Flax module.
      params: the parameters of the model.
      loss: 'softmax' or 'sigmoid'. With softmax the target is spread evenly over the labels of an
        image.
      devices: the devices that compute the model.
      batches: the batches from pipeline.eval_batches with `index`.
      multi_label: whether an image may have several labels.
      with_logits: whether rows have logits.
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
    """The entries `classes`, `confusion` and `mean_class_accuracy` of the result of `score`.

    If several classes have the same name, such as ImageNet's 'crane', the class number follows the
    name.
    """
    names = description.unique_names(names)
    if rows['label'].ndim == 2:
        return {'classes': _average_precisions(rows, names)}
    matrix: dict[str, dict[str, int]] = {name: {} for name in names}
    pairs, counts = np.unique(
        np.stack([rows['label'], rows['predicted']]), axis=1, return_counts=True
    )
    for label, predicted, count in zip(*pairs, counts, strict=True):
        matrix[names[label]][names[predicted]] = int(count)
    classes = {}
    accuracies = []
    for name, predictions in matrix.items():
        num_examples = sum(predictions.values())
        accuracy = None
        if num_examples:
            accuracy = predictions.get(name, 0) / num_examples
            accuracies.append(accuracy)
        classes[name] = {'accuracy': accuracy, 'num_examples': num_examples}
    mean = float(np.mean(accuracies))
    return {'classes': classes, 'confusion': matrix, 'mean_class_accuracy': mean}


def _average_precisions(rows, names):
    """Average precision and number of images of each class, for images with several labels."""
    precisions = average_precision.by_class(rows['logits'], rows['label'])
    counts = rows['label'].sum(0)
    classes = {}
    for name, precision, count in zip(names, precisions, counts, strict=True):
        classes[name] = {
            'average_precision': None if np.isnan(precision) else float(precision),
            'num_examples': int(count),
        }
    return classes


def save(path: str, rows: dict[str, np.ndarray], source: Any) -> None:
    """Writes an .npz file with logits [images, classes], label, name and the names of classes."""
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
    """Writes a CSV file with path, label, prediction and probability of every image.

    The prediction is the most probable class. Several labels of an image are separated by
    semicolons. Rows are in the order of the split, as in `save`.
    """
    order = np.argsort(rows['index'])
    names = description.unique_names(source.class_names)
    table_rows = []
    for number in order:
        label = rows['label'][number]
        if rows['label'].ndim == 2:
            text = ';'.join(names[k] for k in np.flatnonzero(label))
        else:
            text = names[label]
        path_of_image = source.name_of(rows['index'][number])
        prediction = names[rows['predicted'][number]]
        table_rows.append([path_of_image, text, prediction, float(rows['confidence'][number])])
    with writing(path) as temporary, open(temporary, 'w', newline='', encoding='utf-8') as file:
        table_cells.write(file, ['path', 'label', 'prediction', 'probability'], table_rows)
    log.info('wrote %s: %s', path, counted(len(table_rows), 'image'))


def table(result: dict) -> str:
    """The result of `score` as a table: a line per class, the worst class first, and a summary."""
    summary = per_class.from_table(result['classes'])
    lines = _class_lines(result['classes'])
    missing = summary.missing()
    # With --mapping, the weights have many classes that the data set does not have.
    if missing and 'mapping' not in result:
        lines.append(missing)
    where = f'{result["dataset"]}, {result["split"]}'
    for name in ('labels', 'mapping'):
        if name in result:
            where += f', {name} of {result[name]}'
    if result['broken']:
        where += f', {len(result["broken"])} broken left out'
    num_images = counted(result['eval/num_examples'], 'image')
    lines.append(f'{"  ".join(_summary_words(result, summary))}  on {num_images} of {where}')
    return '\n'.join(lines)


def _class_lines(classes):
    """A line for each class with images, the worst class first."""
    scored = []
    for name, row in classes.items():
        score_of_class = row.get('accuracy', row.get('average_precision'))
        if score_of_class is not None:
            scored.append((score_of_class, one_line(name), row['num_examples']))
    scored.sort(key=lambda item: item[0])
    width = max(len(one_line(name)) for name in classes)
    return [f'  {name:<{width}}  {100 * value:6.2f} %  of {count}' for value, name, count in scored]


def _summary_words(result, summary):
    """The entries of the last line: accuracies, worst class, loss and calibration error."""
    words = [f'accuracy {100 * result["eval/accuracy"]:.2f} %']
    if len(result['classes']) >= classification.TOP5.least_classes:
        words.append(f'top-5 {100 * result["eval/accuracy_top5"]:.2f} %')
    precision = result.get(f'{MAIN}/{classification.MEAN_AVERAGE_PRECISION.name}')
    if precision is not None:
        words.append(f'mAP of {summary.count()} {100 * precision:.2f} %')
    else:
        words.append(f'mean of {summary.count()} {100 * result["mean_class_accuracy"]:.2f} %')
    words.append(summary.worst())
    words.append(f'loss {result["eval/loss"]:.4f}')
    error = result['calibration']['expected_error']
    if error is not None:
        words.append(f'calibration error {100 * error:.2f} %')
    return words
