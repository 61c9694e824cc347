"""Measures the accuracy of a workdir or of weights on a data set, in total and per class.

    python -m vit_jax.evaluate --workdir=DIR [--split=SPLIT] [--json]
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=NAME_OR_DIR --split=SPLIT [--json]
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=DIR --split=val --labels=real.json

Images are prepared as the weights say; --preprocess and --classes add what they do not say.
With --json the last line of stdout is one JSON object. Images with several labels count as right if
the most probable class is one of them.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.errors import UserError, check_at_least, check_destination
from vit_jax.evaluators import average_precision, classification
from vit_jax.evaluators.calibration import calibration
from vit_jax.processes import launch
from vit_jax.training import losses, sharding
from vit_jax.weights import Weights, description
from vit_jax.workdir import record


@cli.command
def main(argv: Sequence[str] | None = None) -> None:
    """Returns 0, or 1 after an error that the last line explains."""
    parser = cli.make_parser('evaluate', __doc__)
    cli.add_weights_options(parser)
    parser.add_argument('--dataset', help="TFDS name, directory SPLIT/CLASS/images, or 'digits'; "
                        'the default with --workdir is the data set of the run')
    parser.add_argument('--data_dir', default='', help="of TFDS sets; default: TFDS's own")
    parser.add_argument('--split', help='for example test or train[:10%%]; the default with '
                        "--workdir is the run's dataset.eval_split")
    parser.add_argument('--labels', metavar='FILE.json', help='instead of the labels of a '
                        'directory: a list of lists of class numbers, one for each image in the '
                        "order of file names, such as ImageNet-ReaL's real.json")
    parser.add_argument('--save', metavar='FILE.npz', help='write logits, labels and names of the '
                        'images')
    parser.add_argument('--batch_size', type=int, default=64)
    parser.add_argument('--json', action='store_true')
    options = parser.parse_args(argv)
    launch.refuse_several('vit_jax.evaluate')
    result = evaluate(options)
    # JSON has no NaN, which the loss of weights that are not finite is.
    finite = {k: None if isinstance(x, float) and not np.isfinite(x) else x
              for k, x in result.items()}
    print(json.dumps(finite) if options.json else describe(result))


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Scores the weights on the data that the options name.

    Returns `dataset` and `split`; eval/* as a run logs them; `classes`, the numbers of each by
    name; `calibration`; `confusion`, where images have one label: for the name of each class the
    number of its images by the name of the class that was predicted, without zeros; `broken`, the
    names of all images that cannot be decoded and are left out.
    """
    from vit_jax.data import pipeline  # imports TensorFlow

    check_at_least('--batch_size', options.batch_size, 1)
    if options.save:  # now, not after the work
        check_destination(options.save, '.npz')
    loaded = cli.read_weights(options)
    model, params = cli.build_model(loaded)
    dataset, loss = data_and_loss(options, loaded)
    source = open_labelled_source(dataset, loaded, options.labels)
    mesh = sharding.make_mesh(config_lib.base().mesh)
    sharding.check_batch(options.batch_size, 1, mesh)
    batches = pipeline.eval_batches(
        source, batch_size=options.batch_size, image_size=loaded.image_size(),
        preprocess=description.complete_preprocess(loaded), share=sharding.data_share(mesh),
        files_at_once=dataset['files_at_once'], max_broken_fraction=1.0, with_index=True)
    totals = total(model, params, loss, mesh, batches, with_logits=bool(options.save))
    rows = totals['rows']
    if options.save:
        save(options.save, rows, source)
    if source.multi_label and loss['name'] == 'softmax':  # which is compared between images
        rows['logits'] = np.asarray(jax.nn.log_softmax(rows['logits']))
    return {'dataset': dataset['name'], 'split': dataset['eval_split'],
            **classification.metrics(totals), 'broken': batches.broken,
            'calibration': calibration(rows['confidence'], rows['right']),
            **by_class(rows, source.class_names)}


def total(model: nn.Module, params: PyTree, loss: dict[str, Any], mesh: jax.sharding.Mesh,
          batches: Iterable, with_logits: bool) -> dict[str, Any]:
    """Sums over all batches: those of classification.logit_sums.

    With `rows` for every image: index, label, predicted (the most probable class), its probability
    (confidence), and right, whether it is a label. Logits where labels are several, or if asked
    for. The loss softmax is that of targets spread evenly over the labels of an image.
    """
    make_probabilities = jax.nn.sigmoid if loss['name'] == 'sigmoid' else jax.nn.softmax
    given_loss = losses.make_loss(**loss)

    def loss_of(logits, labels):
        if labels.ndim == 2 and loss['name'] == 'softmax':
            labels /= jnp.maximum(labels.sum(axis=-1, keepdims=True), 1)
        return given_loss(logits, labels)

    def step(params, batch):
        logits = model.apply({'params': params}, batch['image'])
        sums = classification.logit_sums(logits, batch, loss_of)
        rows = {name: batch[name] for name in ('index', 'label', 'mask')}
        rows |= {'predicted': logits.argmax(-1),
                 'confidence': make_probabilities(logits).max(-1),
                 'right': classification.top_hits(logits, batch['label'])[:, 0]}
        rows |= {'logits': logits} if with_logits else {}
        return sums | {'rows': rows | sums.get('rows', {})}

    params = jax.device_put(params, sharding.replicated(mesh))
    return classification.total(jax.jit(step), params, sharding.feed(batches, mesh))


def by_class(rows: dict[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """The entries `classes` and `confusion` of the result."""
    if rows['label'].ndim == 2:
        precision = average_precision.by_class(rows['logits'], rows['label'])
        return {'classes': {
            name: {'average_precision': None if np.isnan(value) else float(value),
                   'num_examples': int(count)}
            for name, value, count in zip(names, precision, rows['label'].sum(0), strict=True)}}
    matrix = {name: {} for name in names}
    pairs, counts = np.unique(np.stack([rows['label'], rows['predicted']]), axis=1,
                              return_counts=True)
    for label, predicted, count in zip(*pairs, counts, strict=True):
        matrix[names[label]][names[predicted]] = int(count)
    totals = {name: sum(row.values()) for name, row in matrix.items()}
    return {'classes': {name: {'accuracy': row.get(name, 0) / totals[name] if totals[name]
                               else None, 'num_examples': totals[name]}
                        for name, row in matrix.items()},
            'confusion': matrix}


def save(path: str, rows: dict[str, np.ndarray], source: Any) -> None:
    """Writes logits [images, classes], label, name of every image, and the names of classes."""
    order = np.argsort(rows['index'])
    names = [source.name_of(index) for index in rows['index'][order]]
    with open(path, 'wb') as file:
        np.savez(file, logits=rows['logits'][order], label=rows['label'][order],
                 name=np.array(names), classes=np.array(source.class_names))
    cli.LOGGER.info('wrote %s: %d images, %d classes', path, *rows['logits'].shape)


def data_and_loss(options: argparse.Namespace, loaded: Weights
                  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections `dataset` and `loss` of the run's config, or the defaults, with the options."""
    base = config_lib.base()
    dataset, loss = base.dataset.to_dict(), base.loss.to_dict()
    if options.workdir:
        if not (found := record.find(options.workdir)):
            raise UserError(f'--workdir={options.workdir} is not the workdir of a run, nor a '
                            'checkpoint of one (WORKDIR/checkpoints/STEP): for other weights, '
                            'write --pretrained.')
        config, _ = record.read(found[0])
        dataset, loss = dataset | config['dataset'], config['loss']
    elif not (options.dataset and options.split):
        raise UserError('--pretrained needs --dataset=NAME_OR_DIRECTORY and --split=SPLIT.')
    given = {'name': options.dataset, 'data_dir': options.data_dir, 'eval_split': options.split}
    return (dataset | {field: value for field, value in given.items() if value},
            loss | ({'name': loaded.loss} if loaded.loss else {}))


def open_labelled_source(dataset: dict[str, Any], loaded: Weights, labels: str | None):
    """The split, with the lists of labels in a JSON file if one is named; says what is scored."""
    source = open_source(dataset, loaded)
    if labels:
        from vit_jax.data.relabelled import relabelled

        source = relabelled(source, record.read_json(labels, list), labels)
    if source.multi_label and loaded.loss != 'sigmoid':
        cli.LOGGER.info('images have several labels and %s was trained for one: an image is right '
                        'if the most probable class is one of its labels, and the loss is that of '
                        'labels with equal shares', loaded.source)
    elif dataset['multi_label'] and not source.multi_label:
        cli.LOGGER.info('images have one label and %s was trained for several: an image is right '
                        'if the most probable class is its label', loaded.source)
    return source


def open_source(dataset: dict[str, Any], loaded: Weights):
    """The split, with the labels of the weights: by class name where names tell, else by order.

    Weights of other programs may name the same classes differently: then their order is trusted,
    and a warning says so. Raises UserError when the classes are not the same.
    """
    from vit_jax.data import sources

    name, split, data_dir = (dataset[field] for field in ('name', 'eval_split', 'data_dir'))
    source = sources.open_source(name, split, data_dir)
    unique = set(loaded.classes or ())
    # Names do not tell if one occurs twice, as ImageNet's 'crane' and 'maillot' do in many weights.
    by_name = len(unique) == loaded.num_classes > 0 and (
        loaded.layout in ('workdir', 'vit_jax') or not unique.isdisjoint(source.class_names))
    if by_name and source.class_names != tuple(loaded.classes):
        source = sources.open_source(name, split, data_dir, tuple(loaded.classes))
    names = source.class_names
    if len(names) != loaded.num_classes:
        raise UserError(f'{loaded.source} has {loaded.num_classes} classes and {name} has '
                        f'{len(names)}: evaluate on the data set that the head was trained for, or '
                        'fine-tune on this one first (configs/finetune.py).')
    classes = loaded.classes or names
    differing = [k for k, label in enumerate(names) if label != classes[k]]
    if differing:
        k = next((k for k in differing if names[k] in classes), differing[0])
        text = f'class {k} is {classes[k]!r} in {loaded.source} and {names[k]!r} in {name}'
        if by_name or names[k] in classes:
            raise UserError(f'{text}: they are not the same classes in the same order.')
        cli.LOGGER.warning('%s: the order is taken to be the same', text)
    return source


def describe(result: dict) -> str:
    """The result as a table, worst class first."""
    scores = {name: (c.get('accuracy', c.get('average_precision')), c['num_examples'])
              for name, c in result['classes'].items()}
    scored = sorted(((score, name, count) for name, (score, count) in scores.items()
                     if score is not None), key=lambda item: item[0])
    width = max(map(len, scores))
    lines = [f'  {name:<{width}}  {100 * score:6.2f} %  of {count}'
             for score, name, count in scored]
    broken = f', {len(result["broken"])} broken left out' if result['broken'] else ''
    precision = result.get(classification.MEAN_AVERAGE_PRECISION)
    error = result['calibration']['expected_error']
    numbers = [f'accuracy {100 * result["eval/accuracy"]:.2f} %',
               f'top-5 {100 * result["eval/accuracy_top5"]:.2f} %',
               *([f'mAP {100 * precision:.2f} %'] if precision is not None else []),
               f'loss {result["eval/loss"]:.4f}',
               *([f'calibration error {100 * error:.2f} %'] if error is not None else [])]
    return '\n'.join([*lines, (
        f'{"  ".join(numbers)}  on {result["eval/num_examples"]:.0f} images of '
        f'{result["dataset"]}, {result["split"]}{broken}')])


if __name__ == '__main__':
    sys.exit(main())
