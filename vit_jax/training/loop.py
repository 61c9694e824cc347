"""The training loop: from a config and a workdir to checkpoints, metrics and curves."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from jaxtyping import PyTree
from ml_collections import ConfigDict
from tqdm.contrib.logging import logging_redirect_tqdm

from vit_jax import config as config_lib
from vit_jax.evaluators import evaluator as evaluator_lib
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators import per_class
from vit_jax.evaluators.per_class import PerClass
from vit_jax.parallel import feeding
from vit_jax.processes import consensus, launch
from vit_jax.training import accumulation, announcement, chips, run_memory
from vit_jax.training import run as run_lib
from vit_jax.training.run import Run
from vit_jax.training.state import TrainState
from vit_jax.workdir import checkpoint, data_record, descriptions, lock, log_file, record
from vit_jax.workdir.checkpoint import Checkpointer, Snapshot
from vit_jax.workdir.interrupts import Abandoned, Interrupts
from vit_jax.workdir.metrics import MetricsLog
from vit_jax.workdir.outputs import Outputs, RunSettings
from vit_jax.workdir.progress import Meter
from vit_jax.workdir.trackers import Trackers

log = logging.getLogger(__name__)

# If compiling takes fewer seconds, the step was compiled before, to choose accum_steps.
_COMPILED_BEFORE = 0.05


@accumulation.advice_on_memory()
def train(config: ConfigDict, workdir: str, log_to_file: bool = False) -> int:
    """Trains a model, or resumes from the newest checkpoint of the workdir.

    Args:
      config: the config from the file and the command line.
      workdir: created if it does not exist.
      log_to_file: whether log lines are added to train.log of the workdir. This starts once the
        workdir is reserved, so that a refused start does not write into the log of another run.

    Returns:
      0 when the run is complete, 128 + signal number after SIGTERM or SIGINT. The state is then
      saved. A signal that comes too late to stop the run has the same exit code. If one of several
      processes gets a signal, all of them stop at the same step.

    Raises:
      UserError: if the config, the data or the workdir cannot be used.
      DivergedError: if the loss, the gradient or the update is not finite.
    """
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        _check_equal_commands(config, workdir)
        stack.enter_context(lock.reserve(workdir))
        if log_to_file and consensus.is_main():
            log_file.log_to(workdir)
        run, checkpoints, start = _resolve_and_restore(config, workdir, interrupts, stack)
        _record(run)
        outputs = _open_outputs(run, checkpoints, start)
        stack.callback(outputs.close)
        # This context is left first, because closing files could wait for a lost process.
        stack.enter_context(launch.leave_on_error())
        announcement.announce(run, start.state)
        state = start.state
        if outputs.is_complete(start.step):
            _log_complete(run, start.step, checkpoints)
        else:
            outputs.track(Trackers(run.config.trackers, workdir, run.config))
            with logging_redirect_tqdm([logging.getLogger('vit_jax')]):
                state = update(run, state, outputs, interrupts)
            outputs.conclude(int(state.step), interrupts.received)
        received = max(consensus.gather(interrupts.received or 0))  # includes the last step
    received = received or interrupts.received  # includes the closing of files
    if not received:
        return 0
    if outputs.is_complete(int(state.step)):
        log.warning('the run is complete; python -m vit_jax.report %s writes its page', workdir)
    return 128 + received


def _check_equal_commands(config: ConfigDict, workdir: str) -> None:
    """Raises UserError unless all processes have the same config, workdir and version of JAX."""
    consensus.check_equal(
        'the config',
        config_lib.flatten(config) | {'--workdir': workdir, 'version of jax': jax.__version__},
    )


def _resolve_and_restore(
    config: ConfigDict, workdir: str, interrupts: Interrupts, stack: contextlib.ExitStack
) -> tuple[Run, Checkpointer, Snapshot]:
    """Returns the run, its checkpoints, which `stack` closes, and its first snapshot."""
    run, params = run_lib.resolve(config, workdir, interrupts.check)
    checkpoints = Checkpointer(
        workdir,
        run.config.keep_checkpoints,
        run.config.keep_best,
        run.config.keep_every,
        config_lib.of_weights(run.config),
    )
    stack.callback(checkpoints.close)
    start = run_lib.initial_or_restored(run, checkpoints, params)
    if start.step < run.program.num_steps:
        saved_steps = record.saved_steps(checkpoints.directory)
        checkpoints.require_room(start.state, run.number_kept(start.step, saved_steps))
    return run, checkpoints, start


def _record(run: Run) -> None:
    """Writes the files of the workdir that describe the run."""
    record.write(run.workdir, run.config, run.train_data.class_names)
    data_record.write(run.workdir, run.data)
    descriptions.write(run.workdir, run.described())
    if not run.config.keep_best:
        checkpoint.forget_best(run.workdir)


def _open_outputs(run: Run, checkpoints: Checkpointer, start: Snapshot) -> Outputs:
    """The outputs of a run that starts or resumes at `start`."""
    num_steps = run.program.num_steps
    meter = Meter(
        run.config.batch_size,
        num_steps,
        run.program.flops_per_step(),
        chips.peak_flops(jax.devices()[0].device_kind),
        run.evaluations_left(start.step),
        len(run.eval_batches),
    )
    rows = MetricsLog(run.workdir)
    rows.open(start.step)
    rows.compare(start.extra.get('metrics'))
    settings = RunSettings(
        num_steps,
        run.config.dataset.num_classes,
        run.config.best_metric,
        run.config.patience,
        run.described(),
    )
    return Outputs(run.workdir, start, settings, checkpoints, rows, meter)


def _log_complete(run: Run, step: int, checkpoints: Checkpointer) -> None:
    field = 'patience'
    if step == run.program.num_steps:
        field = 'num_steps or num_epochs'
    log.info(
        'the run is complete at step %d: to continue, raise %s. Checkpoints: %s',
        step,
        field,
        checkpoints.directory,
    )


def update(run: Run, state: TrainState, outputs: Outputs, interrupts: Interrupts) -> TrainState:
    """Trains until the run is complete (section 4.1): batch, update, log, evaluate, save.

    Returns:
      The saved state after the last step: at the end of the run, after a signal, or after the
      evaluation that exhausts config.patience.
    """
    num_steps = run.program.num_steps
    step = int(state.step)
    # An interrupted run resumes with the evaluations that it could not finish.
    missing = [name for name in run.due_evaluators(step) if not outputs.has_values(step, name)]
    if missing:
        evaluate(run, missing, state, outputs, interrupts)
    if step == num_steps or outputs.has_lost_patience():
        return state
    train_step, compile_seconds = _compiled(run, outputs, interrupts)
    batches = _batches(run, step, outputs, interrupts)
    values = None
    while step < num_steps and not (outputs.has_lost_patience() or interrupts.anywhere()):
        previous_values = values
        is_first = values is None
        try:
            batch = next(batches)
        except Abandoned:
            log.warning(
                'the next batch has not arrived: the data are slow, or a file does not answer'
            )
            break
        if is_first:
            outputs.begin_first_step(step, compile_seconds)
        state, values = train_step(state, batch, *run.constants)
        step += 1
        if is_first:
            interrupts.wait_for(
                jax.block_until_ready, values, meanwhile=outputs.wait_for_first_step, gives_up=False
            )
            interrupts.have_steps()
            outputs.advance(step, values)
        else:
            outputs.advance(step - 1, previous_values)
        _log_evaluate_and_save(run, step, state, values, outputs, interrupts)
    if values is not None:  # after a signal, the last step may be unsaved
        outputs.save(step, state, values)
    return state


def _batches(run: Run, step: int, outputs: Outputs, interrupts: Interrupts) -> Iterator:
    """The batches after `step`, on the devices."""
    outputs.meter.start(step)
    outputs.show('reading the first batch')
    batches = outputs.meter.timed(run.train_batches(start_step=step))
    return interrupts.each(
        feeding.feed(batches, run.program.mesh), meanwhile=outputs.wait_for_batch
    )


def _compiled(run: Run, outputs: Outputs, interrupts: Interrupts) -> tuple[Callable, float]:
    """Checks the memory; returns the compiled training step and the seconds of compiling."""
    interrupts.check_alone()
    begin = time.perf_counter()
    outputs.show('compiling the training step')
    train_step = run.program.train_step
    seconds = time.perf_counter() - begin
    if seconds > _COMPILED_BEFORE:
        log.info('compiled the training step in %.1f s', seconds)
    run_memory.make_room(run.program)
    interrupts.check_alone()
    return train_step, seconds


def _log_evaluate_and_save(run, step, state, values, outputs, interrupts):
    """Logs, evaluates and saves as far as each is due after this step."""
    if run.is_due('log', step):
        outputs.log(step, values)
    evaluation = None
    due_evaluators = run.due_evaluators(step)
    if due_evaluators:
        outputs.require_finite(step, values)
        with outputs.saved_if_it_fails(step, state, values):
            evaluation = evaluate(run, due_evaluators, state, outputs, interrupts)
    may_be_best = run.config.keep_best and run.config.best_metric in (evaluation or {})
    if may_be_best or run.is_due('keep', step) or run.is_due('checkpoint', step):
        outputs.save(step, state, values)


def evaluate(
    run: Run, names: Sequence[str], state: TrainState, outputs: Outputs, interrupts: Interrupts
) -> dict[str, float] | None:
    """Runs evaluators and logs their metrics.

    Args:
      run: the run with the evaluators and their data.
      names: the names of the evaluators that are due.
      state: the state whose averaged parameters, if there are any, or parameters are scored.
      outputs: the outputs that log the metrics.
      interrupts: the signals that stop the evaluation.

    Returns:
      The metrics by their names in metrics.jsonl; None if a signal stops the evaluation.
    """
    begin = time.perf_counter()
    step = int(state.step)
    outputs.show(f'evaluating after step {step}')
    params = state.params if state.ema_params is None else state.ema_params
    values: dict[str, float] | None = None
    classes: PerClass | None = None
    try:
        values, classes = _measure(run, names, step, params, outputs, interrupts)
    except Abandoned:
        log.warning('the evaluation is not finished: the next start repeats it')
    if values:
        outputs.log_evaluation(
            step,
            values,
            time.perf_counter() - begin,
            missing=classes.missing() if classes else '',
            worst=classes.worst() if classes else '',
        )
    outputs.meter.pause(time.perf_counter() - begin)
    return values


def _measure(
    run: Run,
    names: Sequence[str],
    step: int,
    params: PyTree,
    outputs: Outputs,
    interrupts: Interrupts,
) -> tuple[dict[str, float] | None, PerClass | None]:
    """The metrics of some evaluators and the scores of the classes; (None, None) after a signal."""
    values: dict[str, float] = {}
    classes = None
    if metric_lib.MAIN in names:
        totals = interrupts.wait_for(_main_totals, run, params, interrupts.anywhere)
        if totals is None:
            return None, None
        values = _prefixed(metric_lib.MAIN, run.program.objective.evaluator.finish(totals))
        # A finite update can be so large that the evaluation is not finite.
        outputs.require_finite(step, values)
        classes = per_class.from_sums(totals, run.train_data.class_names)
    for named in run.evaluators:
        if named.name not in names:
            continue
        metrics = interrupts.wait_for(named.evaluator.run, params, interrupts.anywhere)
        if metrics is None:
            return None, None
        values |= _prefixed(named.name, metrics)
    return values, classes


def _main_totals(run, params, interrupted):
    """The sums of the objective's evaluator over the evaluation split; None if interrupted."""
    batches = feeding.feed(run.eval_batches, run.program.mesh)
    return evaluator_lib.total(run.program.eval_step, params, batches, interrupted)


def _prefixed(evaluator, values):
    """Metrics by their names in metrics.jsonl, EVALUATOR/NAME."""
    return {f'{evaluator}/{name}': value for name, value in values.items()}
