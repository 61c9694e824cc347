"""A run, resolved: its config, data and weights become one immutable description and a state."""

import dataclasses
import functools
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from clu import parameter_overview
from flax import traverse_util
from jaxtyping import PyTree
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib
from vit_jax import machine, models
from vit_jax.data import broken, cached, folders, pipeline, sequential, sources, subsets
from vit_jax.errors import UserError, some
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators import per_class
from vit_jax.evaluators.metric import Metric
from vit_jax.objectives import teacher as teacher_lib
from vit_jax.parallel import feeding, sharding
from vit_jax.processes import consensus
from vit_jax.training import accumulation, device_defaults, evaluation, optimizer, pretrained
from vit_jax.training import resolve as resolving
from vit_jax.training.program import Program
from vit_jax.training.state import TrainState
from vit_jax.workdir import data_record, record, trackers
from vit_jax.workdir.checkpoint import Checkpointer, Snapshot

log = logging.getLogger(__name__)

# For each split. It is enough for some hundred large photos, or ten thousands of small ones.
SCAN_SECONDS = 20
# Checksums of splits without a broken image: runs of a sweep look once.
_WHOLE: set[int] = set()
_BEGINNING = 0.3e9  # bytes that the process takes between its choices and its first steps


@dataclasses.dataclass(frozen=True)
class Run:
    """All that decides what a run computes; nothing changes it."""

    workdir: str
    config: FrozenConfigDict  # with every number that the user, the data and the devices decide
    program: Program
    train_data: sources.Source
    eval_data: sources.Source
    train_batches: Callable[..., Iterator[pipeline.Batch]]  # those after `start_step` steps
    eval_batches: pipeline.EvalBatches
    evaluators: tuple[evaluation.Named, ...]  # of config.evals, besides the main one
    constants: tuple[PyTree, ...]  # on the devices, see Program.abstract_constants
    data: dict[str, dict]  # names, sizes and labels of the images, see workdir/data_record.py

    def due(self, what: str, step: int) -> bool:
        """Whether `config.WHAT_every` falls on a step; the last step is always due."""
        return self._falls_on(step, self.config[f'{what}_every'])

    def _falls_on(self, step, every):
        is_last = step == self.program.num_steps
        return step > 0 and (is_last or (every > 0 and step % every == 0))

    def due_evaluators(self, step: int) -> list[str]:
        """The names of the evaluators that score the model after a step, the main one first."""
        names = []
        if self.due('eval', step):
            names.append(metric_lib.MAIN)
        for named in self.evaluators:
            if self._falls_on(step, named.every or self.config.eval_every):
                names.append(named.name)
        return names

    def described(self) -> dict[str, Metric]:
        """The metrics of all evaluators by their names in metrics.jsonl, the main ones first."""
        main = self.program.objective.evaluator.metrics
        metrics = metric_lib.described(metric_lib.MAIN, main)
        for named in self.evaluators:
            metrics |= named.described()
        return metrics

    def evaluations_left(self, step: int) -> int:
        """How many evaluations come after a step, the one at the end of the run among them."""
        every = self.config.eval_every
        last = self.program.num_steps
        regular = last // every - step // every if every else 0
        ends_with_one_more = last > step and not (every and last % every == 0)
        return regular + 1 if ends_with_one_more else regular

    def number_kept(self, step: int, saved: Sequence[int]) -> int:
        """How many checkpoints there may be at the end, if those of `saved` are there at `step`."""
        config, every = self.config, self.config.keep_every
        return (
            config.keep_checkpoints
            + config.keep_best
            + (
                every
                and (
                    self.program.num_steps // every
                    - step // every
                    + sum(k % every == 0 for k in saved)
                )
            )
        )


def resolve(
    config: ConfigDict, workdir: str, check: Callable[[], None] = lambda: None
) -> tuple[Run, PyTree | None]:
    """The run that a config describes in a workdir, where it may have begun already.

    It looks up what the machine, the data and the weights are; resolve.py makes the config of it.
    Also returns the pre-trained parameters that it begins from, without a head, None for a run that
    has none or that is continued. `check` is called in what takes long, and may raise. Raises
    UserError when the config, the weights or the data cannot be used, or the workdir belongs to
    another run.
    """
    begun = record.begun(workdir)
    recorded = begun[0] if begun else None
    config = config_lib.with_values_read(config)
    taken, weights = pretrained.take_fields(config, recorded)
    config = resolving.checked(config, taken)
    trackers.require(config.trackers)
    config = resolving.as_recorded(config, recorded)
    config = resolving.with_host_devices(config, device_defaults.shown_devices(config))
    mesh = sharding.make_mesh(config.mesh)
    share = feeding.data_share(mesh)
    config = resolving.with_paths(config, pretrained.absolute_paths(config, recorded))
    config = resolving.with_paths(config, absolute_paths(config))
    config = resolving.with_splits(config, *_chosen_splits(config.dataset))
    device = mesh.devices.flat[0]
    config = resolving.with_device_defaults(
        config, device.platform, device, device_defaults.fastest_dtype(device.platform)
    )
    dataset = config.dataset
    check_alone = check if consensus.count() == 1 else _do_nothing
    check_alone()
    splits = open_data(dataset)
    train_data = splits.train
    eval_data = splits.evaluation
    check_alone()
    data = described_data(train_data, eval_data)
    if recorded is not None:
        data_record.require_same(workdir, recorded, config, data)
    else:
        train_data, eval_data = without_broken(
            {'train': train_data, 'eval': eval_data}, data, dataset, share, check_alone
        )
    check_alone()
    teacher = teacher_lib.load(config, train_data.class_names)
    config = resolving.with_teacher(config, teacher.checksum if teacher else 0)
    config = resolving.with_data(
        config,
        train_data.num_examples,
        len(train_data.class_names),
        train_data.multi_label,
        splits.whole,
        _class_counts(config, train_data),
    )
    check_shuffle_memory(train_data, dataset.shuffle_buffer, share[1])
    if begun:
        record.require_same_run(workdir, begun, config, train_data.class_names)
    check_batch_size(config, train_data.num_examples, has_begun=bool(begun))
    check_alone()
    config = resolving.with_accum_steps(config, mesh, teacher=teacher)
    program = Program(config, mesh, teacher=teacher)
    if not begun:  # a run of an earlier version keeps names that match nothing
        _require_training_images(config, train_data, program.objective.uses_labels)
        optimizer.check_decay_names(program.abstract_state.params, config.optimizer.decay_names)
    # Before steps are compiled to choose their parts: weights of another model are told at once.
    params = weights and pretrained.initial_params(weights, config, program.abstract_state.params)
    program = program_that_fits(program)
    check_alone()
    constants = program.placed_constants()
    settings = dict(
        batch_size=config.batch_size,
        image_size=config.image_size,
        preprocess=config.preprocess,
        files_at_once=dataset.files_at_once,
        max_broken_fraction=dataset.max_broken_fraction,
        share=share,
    )
    train_batches = functools.partial(
        pipeline.train_batches,
        _photos(train_data, dataset, share, check),
        pipeline.TrainSettings(
            seed=config.seed,
            augment=config.augment,
            shuffle_buffer=dataset.shuffle_buffer,
            balance=dataset.balance,
            **settings,
        ),
    )
    run = Run(
        workdir,
        program.config,
        program,
        train_data,
        eval_data,
        train_batches,
        pipeline.eval_batches(eval_data, **settings),
        evaluation.evaluators(program, train_data, eval_data, settings),
        constants,
        data,
    )
    _check_best_metric(run)
    return run, params


def _chosen_splits(dataset):
    """The names of the splits for training and evaluation, which the config may leave open."""
    return folders.choose_splits(dataset.name, dataset.train_split, dataset.eval_split)


def _photos(train_data, dataset, share, check):
    """The training images, out of the cache if the config has one."""
    if dataset.cache == 'none':
        return train_data
    photos = cached.cached(train_data, dataset.cache_dir, dataset.cache_size, share, check)
    broken.require_few(photos, dataset.max_broken_fraction, photos.num_examples)
    return photos


def _do_nothing():
    """In place of a check."""


def check_batch_size(config: ConfigDict, num_examples: int, has_begun: bool = False) -> None:
    """Raises UserError for a batch that is larger than the training split.

    A run that `has_begun` with an earlier version, which allowed it, gets a warning.
    """
    if config.batch_size <= num_examples:
        return
    problem = (
        f'batch_size is {config.batch_size}, and dataset.train_split '
        f'{config.dataset.train_split} of {config.dataset.name!r} has {num_examples} images'
    )
    if has_begun:
        log.warning('%s: each step shows images more than once', problem)
        return
    possible = 2 ** (num_examples.bit_length() - 1)
    raise UserError(
        f'{problem}: expected at most {num_examples}, as in --config.batch_size={possible}. With '
        'another batch also see optimizer.learning_rate, num_steps and optimizer.warmup_steps.'
    )


def program_that_fits(program: Program) -> Program:
    """The program, with its batch in few parts if that is open; UserError if it needs too much."""
    config = program.config
    pixels = math.prod(config.image_size) * config.batch_size // sharding.batch_parts(program.mesh)
    accumulation.check_fits(pixels * 3 * 4, 'a batch of images')
    accumulation.check_fits(
        sharding.bytes_per_device((program.arguments, program.abstract_state.params)),
        'what a step begins with (parameters, their gradients, optimizer state and the batch)'
        + ''.join(f' beside a {name}' for name in program.objective.frozen),
    )
    if config.accum_steps:
        return program
    return accumulation.choose(program, reserved=bytes_besides(program))


def absolute_paths(config: ConfigDict) -> dict[str, str]:
    """Absolute paths of data sets and labels, by dotted field, where the config names files."""
    paths = evaluation.absolute_paths(config)
    path = os.path.expanduser(config.dataset.name)
    if config.dataset.name != 'digits' and os.path.isdir(path):
        paths['dataset.name'] = os.path.abspath(path)
    return paths


def _check_best_metric(run):
    metric = run.config.best_metric
    known = metric_names(run)
    if metric not in known:
        raise UserError(
            f'best_metric is {metric!r}: expected one of those that this '
            f'run evaluates, {", ".join(known)}. Few-shot accuracies come with '
            'evals.fewshot.shots.'
        )


def metric_names(run: Run) -> list[str]:
    """The numbers of evaluations that tell how good the model is, for best_metric."""
    return [name for name, metric in run.described().items() if metric.best]


def _class_counts(config, data):
    """Of the training split, where the config needs them."""
    for field, needs in (
        ('dataset.balance', config.dataset.balance),
        ('loss.class_weights', 'balanced' in config.loss.class_weights),
    ):
        if needs:
            return sources.class_counts(data, field).tolist()
    return None


def _require_training_images(config, data, uses_labels):
    """Raises UserError if a class has no training images, and so cannot be learned.

    Of images with several labels, such a class is one that no image shows.
    """
    empty = sources.classes_without_examples(data)
    if empty and uses_labels and not data.multi_label:
        raise UserError(
            f'dataset.train_split {config.dataset.train_split} of {config.dataset.name!r} has '
            f'{per_class.missing_classes(empty, len(data.class_names))}. A model cannot learn a '
            'class without images: take a larger split or dataset.subset, add images, or remove '
            'the class (its folder in every split, or its line in classes.txt).'
        )


class Splits(NamedTuple):
    """The data of a run."""

    train: sources.Source  # the training split, or its subset
    evaluation: sources.Source
    whole: int  # examples of the training split of which `train` is a subset; 0 if it is none


def open_data(dataset: ConfigDict) -> Splits:
    """Opens the splits of `config.dataset`, the same on all processes."""
    train = sources.open_split(dataset, dataset.train_split)
    whole = train.num_examples if dataset.subset else 0
    train = subsets.subset(train, dataset.subset, dataset.train_split)
    names = train.class_names
    if len(names) < 2:
        raise UserError(
            f"'{dataset.name}' has one class, '{names[0]}': a classifier needs two or "
            'more, in a directory one folder SPLIT/CLASS/ for each.'
        )
    evaluation = sources.open_split(dataset, dataset.eval_split, names)
    if train.multi_label != evaluation.multi_label:
        kinds = ['several labels' if x.multi_label else 'one label' for x in (train, evaluation)]
        raise UserError(
            f'the images of {dataset.train_split} have {kinds[0]} each, those of '
            f'{dataset.eval_split} {kinds[1]}: expected the same of both.'
        )
    consensus.check_equal(
        'the data',
        {
            'training images': train.num_examples,
            'evaluation images': evaluation.num_examples,
            'several labels': train.multi_label,
            'classes': len(names),
            'checksum of their names': zlib.crc32('\n'.join(names).encode()),
            'checksum of labels': 0 if train.labels is None else zlib.crc32(train.labels.tobytes()),
        },
    )
    return Splits(train, evaluation, whole)


def described_data(train: sources.Source, evaluation: sources.Source) -> dict[str, dict]:
    """What data_record keeps of both splits, the same on all processes."""
    data = {
        name: data_record.describe(source.num_examples, source.listing())
        for name, source in (('train', train), ('eval', evaluation))
    }
    data_record.check_equal(data)
    return data


def without_broken(
    splits: dict[str, sources.Source],
    data: dict[str, dict],
    dataset: ConfigDict,
    share: tuple[int, int],
    check: Callable[[], None],
) -> list[sources.Source]:
    """The splits, with the broken images that a scan of SCAN_SECONDS for each finds.

    A scan changes no result: training and evaluation leave out the same images when they meet them.
    It tells of broken images before the model is compiled. Processes begin at different images and
    share what they find. Raises UserError if too many images are broken.
    """
    scanned = []
    for name, source in splits.items():
        checksum = data[name]['checksum']
        of_cache = name == 'train' and dataset.cache != 'none'  # which decodes all images itself
        reasons: dict[int, str] = {}
        seen = 0
        if not of_cache and checksum not in _WHOLE:
            reasons, seen = broken.scan(source, SCAN_SECONDS, share, check)
        candidates = {index for indices in consensus.gather(list(reasons)) for index in indices}
        if not candidates and seen == source.num_examples:
            _WHOLE.add(checksum)
        source = broken.with_broken(source, candidates)
        broken.require_few(source, dataset.max_broken_fraction, seen)
        if source.unreadable:
            names = sorted(map(source.name_of, source.unreadable))
            log.warning(
                '%d of %d images of %s are broken and will be left out: %s',
                len(names),
                source.num_examples,
                dataset[f'{name}_split'],
                some(names, 3),
            )
        scanned.append(source)
    return scanned


def bytes_besides(program: Program) -> float:
    """Bytes of a device besides a step's: batches read ahead, on a CPU those of the process."""
    batches, others = feeding.BATCHES_UNDER_WAY, 0.0
    if jax.default_backend() == 'cpu':  # where the input pipeline has no memory of its own
        batches += pipeline.BATCHES_IN_MEMORY
        others = _BEGINNING / jax.local_device_count()
    return others + batches * sharding.bytes_per_device(program.abstract_batch['image'])


def check_shuffle_memory(source: sources.Source, shuffle_buffer: int, num_processes: int) -> None:
    """Raises UserError if the host has no memory for two windows of shuffled examples.

    A machine without that memory would kill the process without a word. Sources that are not read
    in sequence have no windows.

    Args:
      source: the training split.
      shuffle_buffer: examples of a window.
      num_processes: among which the examples are divided.
    """
    if source.pieces is None:
        return
    window = min(shuffle_buffer, math.ceil(source.num_examples / num_processes))
    record_size = sequential.bytes_per_record(source.pieces)
    window_size = window * record_size
    available = machine.available_memory()
    if 2 * window_size <= available:
        return
    fitting = int(0.8 * available / (sequential.WINDOWS_IN_MEMORY * record_size))
    raise UserError(
        f'dataset.shuffle_buffer is {shuffle_buffer}: windows of {window:,} examples take up to '
        f'{sequential.WINDOWS_IN_MEMORY * window_size / 1e9:,.1f} GB of memory, and '
        f'{available / 1e9:,.1f} GB are available. Add '
        f'--config.dataset.shuffle_buffer={max(1, fitting)}, with which fewer examples are mixed '
        'with each other.'
    )


def make_room(program: Program) -> None:
    """Makes room for the compiled step; UserError if it does not fit, and would be killed.

    That is on CPU: other devices refuse by themselves. State and constants are in memory already.
    """
    if jax.default_backend() == 'cpu':
        needed = accumulation.bytes_needed(program.train_step) - sharding.bytes_per_device(
            (program.abstract_state, program.abstract_constants)
        )
        accumulation.make_room(needed + bytes_besides(program))


def initial_or_restored(run: Run, checkpoints: Checkpointer, params: PyTree | None) -> Snapshot:
    """The newest snapshot that can be read, else the initial one, with `params`, if there are any.

    Args:
      params: pre-trained ones, for a run that begins.

    Raises:
      UserError: if no checkpoint can be read, or the state is already past the end of the run.
    """
    snapshot = checkpoints.restore_latest(run.program.abstract_state)
    if snapshot is None:
        return Snapshot(_initial_state(run, params), 0, {})
    if snapshot.step > run.program.num_steps:
        raise UserError(
            f'{run.workdir} is at step {snapshot.step} already and the config asks '
            f'for {run.program.num_steps}. Raise num_steps or num_epochs, or take '
            'another --workdir.'
        )
    return snapshot


def _initial_state(run, params):
    """The state before the first step, with pre-trained `params`, if there are any."""
    state = run.program.initial_state()
    if params is None:
        return state
    params = pretrained.place_params(state.params, params)
    average = None
    if state.ema_params is not None:
        average = jax.tree.map(jnp.copy, params)  # both are donated
    return dataclasses.replace(state, params=params, ema_params=average)


def parameter_kinds(params: PyTree) -> str:
    """How many parameters there are: in all, and a line for each kind of block."""
    counts: dict[str, int] = {}
    layers: dict[str, str] = {}
    for path, x in traverse_util.flatten_dict(params).items():
        kind = '/'.join(path[: 2 if path[0] == 'resnet' else 1])
        counts[kind] = counts.get(kind, 0) + x.size
        if kind == 'blocks':  # which are stacked
            layers[kind] = f'{x.shape[0]} layers'
    wide = max(map(len, counts))
    return '\n'.join(
        [
            f'{sum(counts.values()):,} parameters',
            *(
                f'  {kind:{wide}}  {layers.get(kind, ""):9}  {count:15,}'
                for kind, count in counts.items()
            ),
        ]
    )


def announce(run: Run, state: TrainState) -> None:
    """Logs what will be trained, on what, and what in the config may surprise."""
    config, step, num_steps = run.config, int(state.step), run.program.num_steps
    if step == 0:
        log.info('%s', parameter_kinds(state.params))
        log.debug(
            '%s', parameter_overview.get_parameter_overview(state.params, include_stats=False)
        )
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
    log.info(
        'computed with accum_steps=%d, %s',
        config.accum_steps,
        ', '.join(
            f'model.{field}={config.model[field]}' for field in models.OPEN if field in config.model
        ),
    )
    if run.program.lr_factors is not None:
        sizes = [x.size for x in jax.tree.leaves(state.params)]
        factors = jax.tree.leaves(run.program.lr_factors)
        trained = sum(size for size, factor in zip(sizes, factors, strict=True) if factor)
        log.info('training %s of %s parameters', f'{trained:,}', f'{sum(sizes):,}')
    if _splits_share_images(config.dataset):
        log.warning(
            'dataset.eval_split %s has images of dataset.train_split %s: evaluations score '
            'what the model is trained on. Other images: train[:90%%] and train[90%%:].',
            config.dataset.eval_split,
            config.dataset.train_split,
        )
    if run.program.objective.encoder.num_classes:
        _warn_of_classes(run)
    if config.optimizer.warmup_steps > num_steps / 2:
        log.warning(
            'optimizer.warmup_steps is %d of %d steps: the learning rate reaches its peak '
            'late. Try %d.',
            config.optimizer.warmup_steps,
            num_steps,
            num_steps // 10,
        )
    initial = (config.ema_decay or 0) ** num_steps  # its share of the average at the end
    if initial > 0.2:  # with 0.9999, 20,000 steps of the paper (section 4.2) leave 0.14
        log.warning(
            'ema_decay %g is high for %d steps: at the end %.0f %% of the average, which '
            'is what is evaluated, will be the initial weights. Try %.4g, or 0 for no '
            'average.',
            config.ema_decay,
            num_steps,
            100 * initial,
            max(0, 1 - 10 / num_steps),
        )
    mesh = run.program.mesh
    for name in sharding.unsplit(state.params, mesh):
        log.warning(
            'mesh.fsdp %d divides no axis of %s: every device holds it whole',
            mesh.shape['fsdp'],
            name,
        )
    if 0 < step < num_steps:
        log.info('continuing from the checkpoint of step %d of %d', step, num_steps)


def _warn_of_classes(run):
    """Warns of classes without images, and of weights that classes have twice."""
    dataset = run.config.dataset
    for source, field, consequence in (
        (run.train_data, 'train_split', 'the model cannot learn them'),
        (run.eval_data, 'eval_split', 'accuracies say nothing about them'),
    ):
        empty = sources.classes_without_examples(source)
        if empty:
            log.warning(
                'dataset.%s %s has %s: %s. Take a larger split, or add images.',
                field,
                dataset[field],
                per_class.missing_classes(empty, len(source.class_names)),
                consequence,
            )
    if dataset.balance and run.config.loss.class_weights:
        log.warning(
            'dataset.balance is %g and loss.class_weights are set: rare classes are shown more '
            'often and also weigh more, which makes up for their number twice. Leave out one of '
            'them.',
            dataset.balance,
        )


def _splits_share_images(dataset):
    try:
        return sources.shared_split(
            dataset.train_split, dataset.eval_split, functools.partial(sources.open_split, dataset)
        )
    except UserError:  # TFDS knows more ways to write a split
        return None
