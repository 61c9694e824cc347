"""Measures the accuracy of a workdir or of weights on a data set, in total and per class.

    python -m vit_jax.evaluate --workdir=DIR [--split=SPLIT] [--json]
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=NAME_OR_DIR --split=SPLIT [--json]

Images are prepared as the weights say; --preprocess and --classes add what they do not say.
With --json the last line of stdout is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from vit_jax import cli
from vit_jax import config as config_lib
from vit_jax.errors import UserError, check_at_least
from vit_jax.evaluators import classification
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
    name; `broken`, the names of all images that cannot be decoded and are left out.
    """
    from vit_jax.data import pipeline  # imports TensorFlow

    check_at_least('--batch_size', options.batch_size, 1)
    loaded = cli.read_weights(options)
    model, params = cli.build_model(loaded)
    dataset, loss = data_and_loss(options)
    source = open_source(dataset, loaded)
    mesh = sharding.make_mesh(config_lib.base().mesh)
    sharding.check_batch(options.batch_size, 1, mesh)
    batches = pipeline.eval_batches(
        source, batch_size=options.batch_size, image_size=loaded.image_size(),
        preprocess=description.complete_preprocess(loaded), share=sharding.data_share(mesh),
        files_at_once=dataset['files_at_once'], max_broken_fraction=1.0)
    totals = total(model, params, losses.make_loss(**loss), mesh, batches)
    classes = {name: {'accuracy': float(right / count) if count else None,
                      'num_examples': int(count)}
               for name, right, count in zip(source.class_names, totals['correct_by_class'],
                                             totals['count_by_class'], strict=True)}
    return {'dataset': dataset['name'], 'split': dataset['eval_split'],
            **classification.metrics(totals), 'broken': batches.broken, 'classes': classes}


def total(model: nn.Module, params: PyTree, loss: Callable, mesh: jax.sharding.Mesh,
          batches: Iterable) -> dict[str, np.ndarray]:
    """Sums over all batches: those of classification.logit_sums, and counts for every class."""
    def step(params, batch):
        logits = model.apply({'params': params}, batch['image'])
        hits = batch['mask'] & (logits.argmax(-1) == batch['label'])
        by_class = jax.nn.one_hot(batch['label'], logits.shape[-1])
        return classification.logit_sums(logits, batch, loss) | {
            'count_by_class': batch['mask'].astype(jnp.float32) @ by_class,
            'correct_by_class': hits.astype(jnp.float32) @ by_class}

    params = jax.device_put(params, sharding.replicated(mesh))
    return classification.total(jax.jit(step), params, sharding.feed(batches, mesh))


def data_and_loss(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
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
    return dataset | {field: value for field, value in given.items() if value}, loss


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
    """The result as a table, best class first."""
    classes = sorted(result['classes'].items(), key=lambda item: -(item[1]['accuracy'] or 0))
    width = max(map(len, result['classes']))
    lines = [f'  {name:<{width}}  {100 * c["accuracy"]:6.2f} %  of {c["num_examples"]}'
             for name, c in classes if c['num_examples']]
    broken = f', {len(result["broken"])} broken left out' if result['broken'] else ''
    return '\n'.join([*lines, (
        f'accuracy {100 * result["eval/accuracy"]:.2f} %  top-5 '
        f'{100 * result["eval/accuracy_top5"]:.2f} %  loss {result["eval/loss"]:.4f}  on '
        f'{result["eval/num_examples"]:.0f} images of {result["dataset"]}, '
        f'{result["split"]}{broken}')])


if __name__ == '__main__':
    sys.exit(main())
