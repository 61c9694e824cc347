"""The run of a config in a workdir: an immutable description, and the state that it starts from."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict, FrozenConfigDict

from vit_jax import config as config_lib
from vit_jax.data import folders, pipeline, sources
from vit_jax.errors import UserError
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators.metric import Metric
from vit_jax.objectives import registry
from vit_jax.objectives import teacher as teacher_lib
from vit_jax.parallel import feeding, sharding
from vit_jax.processes import consensus
from vit_jax.training import (
    device_defaults,
    evaluation,
    optimizer,
    pretrained,
    run_data,
    run_memory,
)
from vit_jax.training import resolve as resolving
from vit_jax.training.program import Program
from vit_jax.training.state import TrainState
from vit_jax.weights import Weights
from vit_jax.workdir import record, trackers
from vit_jax.workdir.checkpoint import Checkpointer, Snapshot


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that decides the results of a run.

    Attributes:
      workdir: the directory that the run writes to.
      config: complete, with the numbers of the data and the choices for the devices.
      program: the compiled steps.
      train_data: the training split, without known broken images.
      eval_data: the evaluation split, without known broken images.
      train_batches: yields the training batches after `start_step` steps.
      eval_batches: all images of the evaluation split; may be iterated over repeatedly.
      evaluators: the evaluators of config.evals, without the main evaluator.
      constants: arrays on the devices for Program.abstract_constants.
      data: names, sizes and labels of the images, see workdir/data_record.py.
    """

    workdir: str
    config: FrozenConfigDict
    program: Program
    train_data: sources.Source
    eval_data: sources.Source
    train_batches: Callable[..., Iterator[pipeline.Batch]]
    eval_batches: pipeline.EvalBatches
    evaluators: tuple[evaluation.Named, ...]
    constants: tuple[PyTree, ...]
    data: dict[str, dict]

    def is_due(self, name: str, step: int) -> bool:
        """Whether `config.NAME_every` divides a step, or the step is the last one of the run."""
        return self._falls_on(step, self.config[f'{name}_every'])

    def _falls_on(self, step, every):
        if step == 0:
            return False
        is_last = step == self.program.num_steps
        return is_last or (every > 0 and step % every == 0)

    def due_evaluators(self, step: int) -> list[str]:
        """Names of the evaluators that are due after a step, the main one first."""
        names = []
        if self.is_due('eval', step):
            names.append(metric_lib.MAIN)
        for named in self.evaluators:
            if self._falls_on(step, named.every or self.config.eval_every):
                names.append(named.name)
        return names

    def described(self) -> dict[str, Metric]:
        """The metrics of all evaluators by name in metrics.jsonl, the main evaluator's first."""
        main_metrics = self.program.objective.evaluator.metrics
        metrics = metric_lib.described(metric_lib.MAIN, main_metrics)
        for named in self.evaluators:
            metrics |= named.described()
        return metrics

    def evaluations_left(self, step: int) -> int:
        """Number of main evaluations after a step, including the one at the end of the run."""
        every = self.config.eval_every
        last = self.program.num_steps
        number = 0
        if every:
            number = last // every - step // every
        last_is_regular = every > 0 and last % every == 0
        if step < last and not last_is_regular:
            number += 1
        return number

    def number_kept(self, step: int, saved_steps: Sequence[int]) -> int:
        """Largest number of checkpoints in the workdir at the end of the run.

        Args:
          step: the step that the run starts or resumes at.
          saved_steps: the steps of the checkpoints that exist now.
        """
        number = self.config.keep_checkpoints
        if self.config.keep_best:
            number += 1
        every = self.config.keep_every
        if every:
            kept_already = sum(1 for saved in saved_steps if saved % every == 0)
            kept_later = self.program.num_steps // every - step // every
            number += kept_already + kept_later
        return number


def _do_nothing():
    """A check that always passes."""


def resolve(
    config: ConfigDict, workdir: str, check_interrupts: Callable[[], None] = _do_nothing
) -> tuple[Run, PyTree | None]:
    """Returns the run of a config in a workdir, new or resumed, and its pre-trained parameters.

    This function examines the workdir, the weights, the machine and the data, in this order.
    training/resolve.py computes the config from these facts.

    Args:
      config: the config from the file and the command line.
      workdir: the workdir; if it contains a run, this run resumes.
      check_interrupts: called between slow operations; it may raise.

    Returns:
      The run, and the pre-trained parameters without a head. They are None if there are none or the
      run resumes.

    Raises:
      UserError: if the config, the weights or the data cannot be used, or the workdir contains
        another run.
    """
    begun = record.begun(workdir)
    recorded = begun[0] if begun else None
    config, weights = _config_with_weights(config, recorded)
    host_devices = device_defaults.shown_devices(config.mesh.host_devices)
    mesh = sharding.make_mesh(config.mesh)
    share = feeding.data_share(mesh)
    config = _config_of_machine(config, recorded, mesh, host_devices)
    # A signal to one of several processes stops all of them at the same step, not here.
    check_alone = check_interrupts if consensus.count() == 1 else _do_nothing
    check_alone()
    recorded_dataset = recorded['dataset'] if recorded else None
    data = run_data.open_for_run(config.dataset, workdir, recorded_dataset, share, check_alone)
    check_alone()
    teacher = teacher_lib.load(config, data.train.class_names)
    config = _config_of_data(config, data, teacher)
    run_data.check_shuffle_memory(data.train, config.dataset.shuffle_buffer, share[1])
    if begun:
        record.require_same_run(workdir, begun, config, data.train.class_names)
    run_data.check_batch_size(
        config.batch_size, config.dataset, data.train.num_examples, has_begun=bool(begun)
    )
    check_alone()
    objective = registry.of_config(config, teacher)
    config = resolving.with_accum_steps(config, objective.module, mesh)
    program = Program(config, mesh, objective=objective)
    if not begun:  # runs of earlier versions may have such names and classes
        run_data.require_training_images(config.dataset, data.train, program.objective.uses_labels)
        optimizer.check_decay_names(program.abstract_state.params, config.optimizer.decay_names)
    # The parameters are checked before steps are compiled, because compiling takes minutes.
    params = None
    if weights is not None:
        params = pretrained.initial_params(
            weights, config, program.abstract_state.params, data.train.class_names
        )
    program = run_memory.program_that_fits(program)
    check_alone()
    return _make_run(workdir, program, data, share, check_interrupts), params


def _config_with_weights(
    config: ConfigDict, recorded: dict[str, Any] | None
) -> tuple[FrozenConfigDict, Weights | None]:
    """Returns the checked config, with fields of weights and recorded run, and the weights."""
    config = config_lib.with_values_read(config)
    taken, weights = pretrained.take_fields(config, recorded)
    config = config_lib.checked(config, taken)
    trackers.require(config.trackers)
    return resolving.as_recorded(config, recorded), weights


def _config_of_machine(
    config: FrozenConfigDict, recorded: dict[str, Any] | None, mesh: Mesh, host_devices: int
) -> FrozenConfigDict:
    """The config with the paths, the splits and the fastest choices of this machine."""
    dataset = config.dataset
    recorded_path = (recorded or {}).get('pretrained', '')
    values: dict[str, Any] = {
        'mesh.host_devices': host_devices,
        **pretrained.absolute_paths(config.pretrained, config.teacher.weights, recorded_path),
        **run_data.absolute_paths(dataset, config.evals),
    }
    train_split, eval_split = folders.choose_splits(
        values.get('dataset.name', dataset.name), dataset.train_split, dataset.eval_split
    )
    values['dataset.train_split'] = train_split
    values['dataset.eval_split'] = eval_split
    device = mesh.devices.flat[0]
    dtype = device_defaults.fastest_dtype(device.platform)
    return resolving.with_machine(config, device.platform, device, dtype, values)


def _config_of_data(
    config: FrozenConfigDict, data: run_data.RunData, teacher: teacher_lib.Teacher | None
) -> FrozenConfigDict:
    """The config with the checksum of the teacher and the numbers of the data."""
    train = data.train
    return resolving.with_data(
        config,
        train.num_examples,
        len(train.class_names),
        train.multi_label,
        data.whole,
        run_data.class_counts(train, config.dataset.balance, config.loss.class_weights),
        teacher.checksum if teacher else 0,
    )


def _make_run(
    workdir: str,
    program: Program,
    data: run_data.RunData,
    share: tuple[int, int],
    check_interrupts: Callable[[], None],
) -> Run:
    """Makes the run of a program; places constants and opens the data of the evaluators."""
    config = program.config
    dataset = config.dataset
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
        run_data.cached_photos(data.train, dataset, share, check_interrupts),
        pipeline.TrainSettings(
            seed=config.seed,
            augment=config.augment,
            shuffle_buffer=dataset.shuffle_buffer,
            balance=dataset.balance,
            **settings,
        ),
    )
    run = Run(
        workdir=workdir,
        config=config,
        program=program,
        train_data=data.train,
        eval_data=data.evaluation,
        train_batches=train_batches,
        eval_batches=pipeline.eval_batches(data.evaluation, **settings),
        evaluators=evaluation.evaluators(program, data.train, data.evaluation, settings),
        constants=constants,
        data=data.recorded,
    )
    _check_best_metric(run)
    return run


def _check_best_metric(run):
    metric = run.config.best_metric
    known = metric_names(run)
    if metric not in known:
        raise UserError(
            f'best_metric is {metric!r}: expected a metric that this run evaluates, '
            f'{", ".join(known)}. Few-shot accuracies need evals.fewshot.shots.',
            kind='choice',
            field='best_metric',
            value=metric,
        )


def metric_names(run: Run) -> list[str]:
    """The metrics that `best_metric` can name: one direction of their values is better."""
    return [name for name, metric in run.described().items() if metric.best]


def initial_or_restored(run: Run, checkpoints: Checkpointer, params: PyTree | None) -> Snapshot:
    """Restores the newest readable checkpoint, or makes the initial state if there is none.

    Args:
      run: the run, new or resumed.
      checkpoints: the checkpoints of the workdir.
      params: pre-trained parameters of a new run; None for random parameters.

    Raises:
      UserError: if no checkpoint can be read, or the newest one is past the end of the run.
    """
    snapshot = checkpoints.restore_latest(run.program.abstract_state)
    if snapshot is None:
        return Snapshot(_initial_state(run, params), 0, {})
    num_steps = run.program.num_steps
    if snapshot.step > num_steps:
        raise UserError(
            f'{run.workdir} is at step {snapshot.step}: expected at most step {num_steps}, the '
            'last one of the config. Raise num_steps or num_epochs, or use another --workdir.',
            kind='conflict',
            field='num_steps',
            file=run.workdir,
            value=num_steps,
        )
    return snapshot


def _initial_state(run, params) -> TrainState:
    """The state before the first step, with pre-trained `params` unless they are None."""
    state = run.program.initial_state()
    if params is None:
        return state
    params = pretrained.place_params(state.params, params)
    average = None
    if state.ema_params is not None:
        average = jax.tree.map(jnp.copy, params)  # a copy, because the step donates both
    return dataclasses.replace(state, params=params, ema_params=average)
