"""Accuracy of a workdir, or of weights of any layout, on a data set: in total and per class.

    python -m vit_jax.evaluate --workdir=DIR [--split=SPLIT] [--json]
    python -m vit_jax.evaluate --pretrained=WEIGHTS --dataset=NAME_OR_DIR --split=SPLIT [--json]

Images are prepared as the weights say; what they do not say, --preprocess and --classes do.
With --json the last line of stdout is one JSON object.
"""

import argparse
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.evaluators import classification
from vit_jax.processes import hosts
from vit_jax.training import sharding, steps
from vit_jax.weights import description, files
from vit_jax.weights.layouts import own
from vit_jax.workdir import logs


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 1 after an error that the last line explains."""
    options = parse(argv)
    logs.to_terminal()
    try:
        hosts.refuse_several('vit_jax.evaluate')
        result = evaluate(options)
    except (UserError, OSError) as error:  # OSError: a file that cannot be read
        logs.LOGGER.error('error: %s', error)
        return 1
    except ModuleNotFoundError as error:
        logs.LOGGER.error("error: %s. Reading data needs more: pip install -e '.[train]'", error)
        return 1
    print(json.dumps(result) if options.json else describe(result))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser('vit_jax.evaluate', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--workdir', help='of a run, or one of its checkpoints; its data set '
                        'is the default')
    source.add_argument('--pretrained', help='weights: file, directory, hf:ORG/NAME, timm:NAME')
    parser.add_argument('--dataset', help="TFDS name, directory SPLIT/CLASS/images, or 'digits'")
    parser.add_argument('--data_dir', default='', help="TFDS sets; default: TFDS's own")
    parser.add_argument('--split', help="for example test or train[:10%%]; of a workdir, the "
                        "default is the run's dataset.eval_split")
    description.add_flags(parser)
    parser.add_argument('--batch_size', type=int, default=64)
    parser.add_argument('--json', action='store_true')
    return parser.parse_args(argv)


def evaluate(options: argparse.Namespace) -> dict:
    """The numbers of main().

    Returns:
      `dataset` and `split`; eval/* as a run logs them; `classes` with each one's own; `broken`,
      the names of the images that cannot be decoded and are left out, however many.

    Raises:
      UserError: weights, data or all images cannot be read, or the classes are not the same.
    """
    from vit_jax.data import pipeline  # TensorFlow

    loaded = description.described(weights.load(options.workdir or options.pretrained),
                                   options.preprocess, options.classes)
    description.check_rgb(loaded)
    config = data_config(options, loaded)
    source = _open_source(config.dataset, loaded)
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(config.batch_size, 1, mesh)
    by_example = sharding.batch_sharding(mesh)
    model = models.build(loaded.model, loaded.num_classes)

    def step(params, batch):
        logits = model.apply({'params': params}, batch['image'])
        hits = batch['mask'] & (logits.argmax(-1) == batch['label'])
        by_class = jax.nn.one_hot(batch['label'], loaded.num_classes)
        return steps.logit_sums(logits, batch, config.loss) | {
            'count_by_class': batch['mask'].astype(jnp.float32) @ by_class,
            'correct_by_class': hits.astype(jnp.float32) @ by_class}

    params = jax.device_put(jax.tree.map(lambda x: np.asarray(x, np.float32), loaded.params),
                            sharding.replicated(mesh))
    batches = pipeline.eval_batches(source, config, *sharding.data_share(mesh))
    totals = classification.total(
        jax.jit(step), params, (sharding.shard_batch(batch, by_example) for batch in batches))
    classes = {name: {'accuracy': float(right / count) if count else None,
                      'num_examples': int(count)}
               for name, right, count in zip(source.class_names, totals['correct_by_class'],
                                             totals['count_by_class'], strict=True)}
    return {'dataset': config.dataset.name, 'split': config.dataset.eval_split,
            **classification.metrics(totals), 'broken': batches.broken, 'classes': classes}


def data_config(options: argparse.Namespace, loaded: weights.Weights) -> ConfigDict:
    """A config whose data fields are those of the options, the workdir and the weights."""
    config = config_lib.base()
    if options.workdir:
        if not (found := own.find_workdir(options.workdir)):
            raise UserError(f'--workdir={options.workdir} is no workdir of a run and no checkpoint '
                            'of one (WORKDIR/checkpoints/STEP): for other weights, write '
                            '--pretrained.')
        run = files.read_json(os.path.join(found[0], 'config.json'))
        config.loss.update(run['loss'])
        config.dataset.update({name: tuple(value) if isinstance(value, list) else value
                               for name, value in run['dataset'].items()})
    for field, value in (('name', options.dataset), ('data_dir', options.data_dir),
                         ('eval_split', options.split)):
        if value:
            config.dataset[field] = value
    if not (options.workdir or (options.dataset and options.split)):
        raise UserError('--pretrained needs --dataset=NAME_OR_DIRECTORY and --split=SPLIT.')
    config.image_size = loaded.image_size()
    config.preprocess.update(description.complete_preprocess(loaded))
    config.dataset.max_broken_fraction = 1.0
    config.batch_size = options.batch_size
    if config.batch_size < 1:
        raise UserError(f'--batch_size is {config.batch_size}: expected at least 1.')
    return config


def _open_source(dataset, loaded):
    """The split, labelled as in the weights: by name where names tell, else by order."""
    from vit_jax.data import sources

    source = sources.open_source(dataset, dataset.eval_split)
    if _share_names(loaded, source.class_names) and source.class_names != tuple(loaded.classes):
        source = sources.open_source(dataset, dataset.eval_split, class_names=tuple(loaded.classes))
    check_classes(loaded, source.class_names, dataset.name)
    return source


def check_classes(loaded: weights.Weights, names: tuple[str, ...], dataset: str) -> None:
    """Raises UserError unless label k means the same in the weights and in the data.

    Weights of other programs may call the same classes by other names: then their order is trusted,
    and said.
    """
    if len(names) != loaded.num_classes:
        raise UserError(f'{loaded.source} has {loaded.num_classes} classes and {dataset} has '
                        f'{len(names)}: evaluate on the data set that the head was trained for, or '
                        'fine-tune on this one first (configs/finetune.py).')
    differing = [k for k, name in enumerate(names) if loaded.classes and name != loaded.classes[k]]
    if not differing:
        return
    k = next((k for k in differing if names[k] in loaded.classes), differing[0])
    text = f'class {k} is {loaded.classes[k]!r} in {loaded.source} and {names[k]!r} in {dataset}'
    if names[k] in loaded.classes or _share_names(loaded, names):
        raise UserError(f'{text}: they are not the same classes in the same order.')
    logs.LOGGER.warning('%s: the order is taken to be the same', text)


def _share_names(loaded, names):
    """Whether a name, rather than its place, says which class of the weights one of the data is.

    It does not where a name stands twice, as ImageNet's 'crane' and 'maillot' do in many weights.
    """
    classes = set(loaded.classes or ())
    return len(classes) == loaded.num_classes > 0 and (
        loaded.layout in ('workdir', 'vit_jax') or not classes.isdisjoint(names))


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
