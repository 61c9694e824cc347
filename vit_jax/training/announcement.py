"""The log lines at the start of a run: model, data, machine, and warnings about the config."""

import functools
import logging

import jax
from clu import parameter_overview
from flax import traverse_util
from jaxtyping import PyTree
from ml_collections import ConfigDict

from vit_jax import models
from vit_jax.data import sources
from vit_jax.errors import UserError
from vit_jax.evaluators import per_class
from vit_jax.parallel import sharding
from vit_jax.training.run import Run
from vit_jax.training.state import TrainState

log = logging.getLogger(__name__)

# Warm-up of a larger share of the run is likely a mistake.
_LONG_WARMUP = 1 / 2
# With ema_decay 0.9999, the initial weights still have a share of 0.14 after the 20,000 steps of
# the paper (section 4.2).
_LARGE_INITIAL_SHARE = 0.2


def announce(run: Run, state: TrainState) -> None:
    """Logs the model, the data and the devices of a run, and warns about unusual settings."""
    step = int(state.step)
    num_steps = run.program.num_steps
    if step == 0:
        log.info('%s', parameter_kinds(state.params))
        overview = parameter_overview.get_parameter_overview(state.params, include_stats=False)
        log.debug('%s', overview)
    _log_data_and_devices(run)
    _log_trained_parameters(run, state)
    _warn_of_shared_images(run.config.dataset)
    if run.program.objective.encoder.num_classes:
        _warn_of_classes(run)
    _warn_of_schedule(run.config, num_steps)
    _warn_of_whole_parameters(run, state)
    if 0 < step < num_steps:
        log.info('continuing from the checkpoint of step %d of %d', step, num_steps)


def parameter_kinds(params: PyTree) -> str:
    """The total number of parameters, and a line with the number for each kind of layer."""
    counts: dict[str, int] = {}
    layers: dict[str, str] = {}
    for path, x in traverse_util.flatten_dict(params).items():
        kind = path[0]
        if kind == 'resnet':
            kind = '/'.join(path[:2])
        counts[kind] = counts.get(kind, 0) + x.size
        if kind == 'blocks':  # the arrays of all layers are stacked
            layers[kind] = f'{x.shape[0]} layers'
    width = max(map(len, counts))
    lines = [f'{sum(counts.values()):,} parameters']
    for kind, count in counts.items():
        lines.append(f'  {kind:{width}}  {layers.get(kind, ""):9}  {count:15,}')
    return '\n'.join(lines)


def _log_data_and_devices(run):
    config = run.config
    log.info(
        '%s%d training images, %d evaluation images, %d classes, %d %s, workdir %s',
        f'{config.recipe}: ' if config.recipe else '',
        run.train_data.num_examples,
        run.eval_data.num_examples,
        config.dataset.num_classes,
        jax.device_count(),
        jax.devices()[0].device_kind,
        run.workdir,
    )
    choices = [
        f'model.{field}={config.model[field]}' for field in models.OPEN if field in config.model
    ]
    log.info('computed with accum_steps=%d, %s', config.accum_steps, ', '.join(choices))


def _log_trained_parameters(run, state):
    """Logs how many parameters are trained if optimizer.lr_factors freezes some."""
    if run.program.lr_factors is None:
        return
    sizes = [x.size for x in jax.tree.leaves(state.params)]
    factors = jax.tree.leaves(run.program.lr_factors)
    trained = sum(size for size, factor in zip(sizes, factors, strict=True) if factor)
    log.info('training %s of %s parameters', f'{trained:,}', f'{sum(sizes):,}')


def _warn_of_shared_images(dataset: ConfigDict):
    if not _splits_share_images(dataset):
        return
    log.warning(
        'dataset.eval_split %s has images of dataset.train_split %s: evaluations score '
        'images that the model is trained on. Use separate images: train[:90%%] and '
        'train[90%%:].',
        dataset.eval_split,
        dataset.train_split,
    )


def _splits_share_images(dataset):
    opened = functools.partial(sources.open_split, dataset)
    try:
        return sources.shared_split(dataset.train_split, dataset.eval_split, opened)
    except UserError:  # a split in a notation that only TFDS reads
        return None


def _warn_of_classes(run):
    """Warns of classes without images, and of classes that are balanced twice."""
    dataset = run.config.dataset
    _warn_of_empty_classes(run.train_data, dataset, 'train_split', 'the model cannot learn them')
    _warn_of_empty_classes(
        run.eval_data, dataset, 'eval_split', 'accuracies say nothing about them'
    )
    if dataset.balance and run.config.loss.class_weights:
        log.warning(
            'dataset.balance is %g and loss.class_weights are set: rare classes are shown more '
            'often and also weigh more, which makes up for their number twice. Remove one of '
            'the two.',
            dataset.balance,
        )


def _warn_of_empty_classes(source, dataset, field, consequence):
    empty_classes = sources.classes_without_examples(source)
    if empty_classes:
        log.warning(
            'dataset.%s %s has %s: %s. Use a larger split, or add images.',
            field,
            dataset[field],
            per_class.missing_classes(empty_classes, len(source.class_names)),
            consequence,
        )


def _warn_of_schedule(config, num_steps):
    """Warns of a long warm-up, and of an average that keeps much of the initial weights."""
    if config.optimizer.warmup_steps > _LONG_WARMUP * num_steps:
        log.warning(
            'optimizer.warmup_steps is %d of %d steps: the learning rate reaches its peak '
            'late. Try %d.',
            config.optimizer.warmup_steps,
            num_steps,
            num_steps // 10,
        )
    initial_share = (config.ema_decay or 0) ** num_steps
    if initial_share > _LARGE_INITIAL_SHARE:
        log.warning(
            'ema_decay %g is high for %d steps: at the end the initial weights have a share of '
            '%.0f %% in the average, and evaluations score the average. Try %.4g, or 0 for no '
            'average.',
            config.ema_decay,
            num_steps,
            100 * initial_share,
            max(0, 1 - 10 / num_steps),
        )


def _warn_of_whole_parameters(run, state):
    """Warns of large parameters that mesh.fsdp cannot split."""
    mesh = run.program.mesh
    for name in sharding.unsplit(state.params, mesh):
        log.warning(
            'mesh.fsdp %d divides no axis of %s: every device stores the whole array',
            mesh.shape['fsdp'],
            name,
        )
