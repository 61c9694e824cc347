"""The training loop: from a config and a workdir to checkpoints, metrics and curves."""

import contextlib
import logging
import time
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict
from tqdm.contrib.logging import logging_redirect_tqdm

from vit_jax import config as config_lib
from vit_jax.evaluators import evaluator as evaluator_lib
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators import per_class
from vit_jax.parallel import feeding
from vit_jax.processes import consensus, launch
from vit_jax.training import accumulation, chips
from vit_jax.training import run as run_lib
from vit_jax.training.run import Run
from vit_jax.training.state import TrainState
from vit_jax.workdir import checkpoint, data_record, descriptions, lock, log_file, record
from vit_jax.workdir.checkpoint import Checkpointer
from vit_jax.workdir.interrupts import Abandoned, Interrupts
from vit_jax.workdir.metrics import MetricsLog
from vit_jax.workdir.outputs import Outputs, RunSettings
from vit_jax.workdir.progress import Meter

log = logging.getLogger(__name__)


@accumulation.advice_on_memory()
def train(config: ConfigDict, workdir: str, log_to_file: bool = False) -> int:
    """Trains, or continues from the newest checkpoint of the workdir, which is made when missing.

    With `log_to_file` log lines are added to train.log of the workdir, from when it is reserved for
    this run: a start that is refused writes nothing into the log of the run that is training.

    Returns 0 when the run is complete; 128 + signal number when SIGTERM or SIGINT came, saved, also
    when it came too late to stop the run. With several processes, what stops one of them stops all,
    at the same step.

    Raises UserError when the config, the data or the workdir cannot be used, and DivergedError when
    the loss, the gradient or the update is not finite.
    """
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        consensus.check_equal(
            'the config',
            config_lib.flatten(config) | {'--workdir': workdir, 'version of jax': jax.__version__},
        )
        stack.enter_context(lock.reserve(workdir))
        if log_to_file and consensus.is_main():
            log_file.log_to(workdir)
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
        del params  # the host needs them no longer
        state = start.state
        step = start.step
        num_steps = run.program.num_steps
        if step < num_steps:
            checkpoints.require_room(
                state, run.number_kept(step, record.saved_steps(checkpoints.directory))
            )
        record.write(workdir, run.config, run.train_data.class_names)
        data_record.write(workdir, run.data)
        descriptions.write(workdir, run.described())
        if not run.config.keep_best:
            checkpoint.forget_best(workdir)
        meter = Meter(
            run.config.batch_size,
            num_steps,
            run.program.flops_per_step(),
            chips.peak_flops(jax.devices()[0].device_kind),
            run.evaluations_left(step),
            len(run.eval_batches),
        )
        rows = MetricsLog(workdir)
        rows.open(step)
        rows.compare(start.extra.get('metrics'))
        outputs = Outputs(
            workdir,
            start,
            RunSettings(
                num_steps,
                run.config.dataset.num_classes,
                run.config.best_metric,
                run.config.patience,
                run.described(),
            ),
            checkpoints,
            rows,
            meter,
        )
        stack.callback(outputs.close)
        # Before anything is closed, which could wait for a process that is lost.
        stack.enter_context(launch.leave_on_error())
        run_lib.announce(run, state)
        if outputs.is_complete(step):
            log.info(
                'the run is complete at step %d: to continue, raise %s. Checkpoints: %s',
                step,
                'num_steps or num_epochs' if step == num_steps else 'patience',
                checkpoints.directory,
            )
        else:
            outputs.track(run.config)
            with logging_redirect_tqdm([logging.getLogger('vit_jax')]):
                state = update(run, state, outputs, interrupts)
            outputs.conclude(int(state.step), interrupts.received)
        received = max(consensus.gather(interrupts.received or 0))  # also after the last step
    received = received or interrupts.received  # while the files were being closed
    if received and outputs.is_complete(int(state.step)):
        log.warning('the run is complete; python -m vit_jax.report %s writes its page', workdir)
    return 128 + received if received else 0


def update(run: Run, state: TrainState, outputs: Outputs, interrupts: Interrupts) -> TrainState:
    """The steps that are left (section 4.1): batch, update, log, evaluate, save.

    Returns the state, saved, after the last step, or after the one during which a signal came or
    patience was lost.
    """
    program = run.program
    step = int(state.step)
    values = None
    missing = [name for name in run.due_evaluators(step) if not outputs.has_values(step, name)]
    if missing:  # the run was interrupted before them
        evaluate(run, missing, state, outputs, interrupts)
    if step == program.num_steps or outputs.has_lost_patience():
        return state
    train_step, compile_seconds = _compiled(run, outputs, interrupts)
    outputs.meter.start(step)
    outputs.show('reading the first batch')
    batches = interrupts.each(
        feeding.feed(outputs.meter.timed(run.train_batches(start_step=step)), program.mesh),
        meanwhile=outputs.wait_for_batch,
    )
    while step < program.num_steps and not (outputs.has_lost_patience() or interrupts.anywhere()):
        before = values
        is_first = values is None
        try:
            batch = next(batches)
        except Abandoned:
            log.warning(
                'the next batch does not come: the data are slow, or a file does not answer'
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
            outputs.advance(step - 1, before)
        _log_evaluate_save(run, step, state, values, outputs, interrupts)
    if values is not None:  # a signal may come at any time: save what the loop did not
        outputs.save(step, state, values)
    return state


def _compiled(run, outputs, interrupts):
    """The compiled training step, for which there is memory, and the seconds that it took."""
    interrupts.check_alone()
    begin = time.perf_counter()
    outputs.show('compiling the training step')
    train_step = run.program.train_step
    seconds = time.perf_counter() - begin
    if seconds > 0.05:  # else choosing accum_steps has compiled it
        log.info('compiled the training step in %.1f s', seconds)
    run_lib.make_room(run.program)
    interrupts.check_alone()
    return train_step, seconds


def _log_evaluate_save(run, step, state, values, outputs, interrupts):
    """What is due after a step."""
    if run.due('log', step):
        outputs.log(step, values)
    evaluation = None
    due = run.due_evaluators(step)
    if due:
        outputs.require_finite(step, values)
        with outputs.saved_if_it_fails(step, state, values):
            evaluation = evaluate(run, due, state, outputs, interrupts)
    may_be_best = run.config.keep_best and run.config.best_metric in (evaluation or {})
    if may_be_best or run.due('keep', step) or run.due('checkpoint', step):
        outputs.save(step, state, values)


def evaluate(
    run: Run, names: Sequence[str], state: TrainState, outputs: Outputs, interrupts: Interrupts
) -> dict[str, float] | None:
    """The numbers of the evaluators of these names, by name; None after a signal.

    They score the parameters, or their average if there is one.
    """
    begin = time.perf_counter()
    outputs.show(f'evaluating after step {int(state.step)}')
    params = state.params if state.ema_params is None else state.ema_params
    values: dict[str, float] | None = {}
    classes = None
    try:
        if metric_lib.MAIN in names:
            totals = interrupts.wait_for(_main_totals, run, params, interrupts.anywhere)
            if totals is None:
                values = None
            else:
                values = _prefixed(metric_lib.MAIN, run.program.objective.evaluator.finish(totals))
                # Not finite after an update that was too large, and finite itself.
                outputs.require_finite(int(state.step), values)
                classes = per_class.from_sums(totals, run.train_data.class_names)
        for named in run.evaluators:
            if values is None or named.name not in names:
                continue
            found = interrupts.wait_for(named.evaluator.run, params, interrupts.anywhere)
            if found is None:
                values = None
            else:
                values |= _prefixed(named.name, found)
    except Abandoned:
        log.warning('the evaluation is not finished: the next start repeats it')
        values = None
    if values:
        outputs.log_evaluation(
            int(state.step),
            values,
            time.perf_counter() - begin,
            missing=classes.missing() if classes else '',
            worst=classes.worst() if classes else '',
        )
    outputs.meter.pause(time.perf_counter() - begin)
    return values


def _main_totals(run, params, interrupted):
    """The totals of the objective's evaluator over the evaluation split; None if interrupted."""
    batches = feeding.feed(run.eval_batches, run.program.mesh)
    return evaluator_lib.total(run.program.eval_step, params, batches, interrupted)


def _prefixed(evaluator, values):
    """The metrics of an evaluator by their names in metrics.jsonl."""
    return {f'{evaluator}/{name}': value for name, value in values.items()}
