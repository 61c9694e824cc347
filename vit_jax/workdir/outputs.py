"""Writes the files of a run during training: progress, metrics, curves and checkpoints."""

import contextlib
import dataclasses
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping

from jaxtyping import Array, PyTree

from vit_jax.errors import DivergedError, UserError
from vit_jax.evaluators import classification
from vit_jax.evaluators import metric as metric_lib
from vit_jax.evaluators.metric import Metric
from vit_jax.processes import consensus
from vit_jax.workdir import curves, descriptions, metrics, progress
from vit_jax.workdir import scores as scores_lib
from vit_jax.workdir.checkpoint import Checkpointer, Snapshot
from vit_jax.workdir.live_line import LiveLine
from vit_jax.workdir.metrics import MetricsLog
from vit_jax.workdir.trackers import Trackers

log = logging.getLogger(__name__)

_COUNT = f'/{classification.NUM_EXAMPLES.name}'
_LONG_READ = 2  # seconds without a batch until the live line reports it
_TOO_LONG_READ = 60  # seconds without a batch until the log reports it
_ESTIMATE_AFTER = 3  # seconds of steps until the duration of the run is estimated

FINITE = ('loss', 'grad_norm', 'update_norm', 'eval/loss')  # training diverges if one is not finite


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run that its outputs depend on.

    Attributes:
      num_steps: number of steps of the whole run.
      num_classes: number of classes of the data.
      best_metric: name of the metric that selects the best checkpoint.
      patience: the run ends after this number of evaluations without a better value; 0: never.
      described: the metrics of the evaluations by name; None: the metrics of a classifier.
    """

    num_steps: int
    num_classes: int
    best_metric: str = metrics.ACCURACY
    patience: int = 0
    described: Mapping[str, Metric] | None = None


class _MeanLoss:
    """The mean training loss since its last row in metrics.jsonl; checkpoints save it."""

    def __init__(self, start: Snapshot):
        saved = start.extra.get('interval', {})
        self._sum = saved.get('sum', 0.0)
        self._num_steps = saved.get('steps', 0)
        self._last_step = start.step

    def add(self, step, loss):
        """Adds the loss of a step, once."""
        if step > self._last_step:
            self._last_step = step
            self._num_steps += 1
            self._sum += float(loss)

    def value(self):
        """The mean, or None without a step."""
        if not self._num_steps:
            return None
        return self._sum / self._num_steps

    def reset(self):
        self._sum = 0.0
        self._num_steps = 0

    def as_json(self):
        return {'sum': self._sum, 'steps': self._num_steps}


class Outputs:
    """The outputs of a run from its first step, or from the step at which it resumes."""

    def __init__(
        self,
        workdir: str,
        start: Snapshot,
        settings: RunSettings,
        checkpoints: Checkpointer,
        rows: MetricsLog,
        meter: progress.Meter,
    ):
        """Prepares the outputs; only the methods write.

        Args:
          workdir: the directory of the run.
          start: the state at which the run starts or resumes.
          settings: the settings of the run.
          checkpoints: where the state is saved; the caller closes it.
          rows: the metrics, opened at the step of `start`; `close` closes them.
          meter: the speed of the run.
        """
        self.meter = meter
        self._workdir = workdir
        self._num_steps = settings.num_steps
        self._num_classes = settings.num_classes
        self._patience = settings.patience
        self._checkpoints = checkpoints
        self._described = settings.described or metric_lib.described(
            metric_lib.MAIN, classification.METRICS
        )
        self._headline = descriptions.headline(self._described)
        self._metrics = rows
        self._scores = scores_lib.of_rows(
            rows.rows, settings.best_metric, self._described.get(settings.best_metric)
        )
        self._mean_loss = _MeanLoss(start)
        # Texts of the last evaluation, see `log_evaluation`.
        self._missing = ''
        self._worst = ''
        self._line = LiveLine()
        # The step at which this start began to train, and the time.
        self._first_step: tuple[int, float] | None = None
        self._evaluation_seconds = 0.0
        self._has_estimate = False
        self._has_warned_of_data = False
        self._trackers = Trackers((), workdir, {})

    def track(self, trackers: Trackers) -> None:
        """Sends all later rows to the runs of some trackers."""
        self._trackers = trackers

    def show(self, activity: str) -> None:
        """Shows the current activity on a terminal, for work other than training steps."""
        self._line.show(activity, at_once=True)

    def wait_for_batch(self, seconds: float) -> None:
        """Reports that the run has waited `seconds` for the next batch."""
        ordinal = 'first' if self._first_step is None else 'next'
        if seconds > _LONG_READ:
            self.show(f'waiting for the {ordinal} batch, {seconds:.0f} s')
        if seconds > _TOO_LONG_READ and not self._has_warned_of_data:
            self._has_warned_of_data = True
            log.warning(
                'the %s batch has not arrived for %.0f s: the data are slow, or a file does not '
                'answer. Ctrl-C saves and stops.',
                ordinal,
                seconds,
            )

    def begin_first_step(self, step: int, compile_seconds: float) -> None:
        """Reports that the first step of this start begins.

        Args:
          step: number of steps before it.
          compile_seconds: duration of its compilation.
        """
        now = time.perf_counter()
        self._first_step = step, now
        done = [f'read the first batch in {self.meter.seconds():.1f} s']
        if compile_seconds > 0.05:  # otherwise the choice of accum_steps has compiled it
            done.insert(0, f'compiled in {compile_seconds:.1f} s')
        log.info('waiting for the first step (%s)', ', '.join(done))
        self.wait_for_first_step(0.0)

    def wait_for_first_step(self, seconds: float) -> None:
        """Shows the duration of the first step so far."""
        assert self._first_step is not None  # begin_first_step has set it
        step = self._first_step[0]
        done = f'{step}/{self._num_steps} {step / self._num_steps:.0%}'
        self.show(f'{done}  waiting for the first step, {seconds:.0f} s')

    def _estimate(self, step):
        """Logs the estimated duration of the run, once, after a few seconds of steps."""
        first, start = self._first_step
        seconds = time.perf_counter() - start - self._evaluation_seconds
        if self._has_estimate or step in (first, self._num_steps) or seconds < _ESTIMATE_AFTER:
            return
        self._has_estimate = True
        log.info('%s', self.meter.estimate(step, seconds / (step - first)))

    def advance(self, step: int, values: dict[str, Array] | None) -> None:
        """Reports that the devices have started the step after `step`.

        Args:
          step: the previous step.
          values: the values of the previous step, which must be finite. Reading them overlaps with
            the new step.
        """
        if values is not None:
            self._add_loss(step, values)
        if self._first_step is not None:
            self._estimate(step)
        self._line.show(
            progress.live(
                step,
                self._num_steps,
                self._mean_loss.value(),
                self._last_headline(),
                self.meter.speed(step),
            )
        )

    def _last_headline(self):
        """Text such as 'accuracy 98.61 %' for the last evaluation; '' if there is none."""
        values = metrics.scores(self._metrics.rows, self._headline)
        if not values:
            return ''
        metric = self._described[self._headline]
        last_value = list(values.values())[-1]
        return f'{metric.words} {metric.text(last_value)}'

    def log(self, step: int, values: dict[str, Array]) -> None:
        """Writes a row with the values of a training step and the speed since the previous row.

        The loss is the mean over all steps since then, even if the run was interrupted.
        """
        self._add_loss(step, values)  # waits for the step, so that the measured time is right
        row = {name: float(value) for name, value in values.items()}
        row['loss'] = self._mean_loss.value()
        row |= self.meter.report(step)
        self._mean_loss.reset()
        self._write(step, {f'train/{name}': value for name, value in row.items()})
        log.log(
            logging.DEBUG if self._line.shown else logging.INFO,
            '%s',
            progress.describe(step, self._num_steps, row),
        )

    def _write(self, step, values):
        self._metrics.write(step, values)
        self._trackers.write(step, values)

    def _add_loss(self, step, values):
        self.require_finite(step, values)
        self._mean_loss.add(step, values['loss'])

    def log_evaluation(
        self,
        step: int,
        values: dict[str, float],
        seconds: float,
        missing: str = '',
        worst: str = '',
    ) -> None:
        """Writes the result and the duration of an evaluation, and draws the curves.

        Args:
          step: the step of the evaluated parameters.
          values: the metrics by name, for example eval/accuracy.
          seconds: duration of the evaluation.
          missing: text for the log about classes without images, see per_class.PerClass; or ''.
          worst: text for the end of the log about the worst class, or ''.
        """
        self._missing = f' ({missing})' if missing else ''
        self._worst = f', {worst}' if worst else ''
        self._evaluation_seconds += seconds
        values = consensus.from_main(lambda: values)  # all processes make the same decisions
        self._warn_of_other_images(values)
        self._write(step, values | {descriptions.SECONDS: seconds})
        if self._scores.metric in values:
            self._scores = self._scores.adding(step, values[self._scores.metric])
        if consensus.is_main():
            curves.draw(
                self._metrics.rows,
                self._workdir,
                self._num_classes,
                progress.taken(self._metrics.rows, self.meter.batch_size),
                {**descriptions.read(self._workdir), **self._described},
            )
        text = self._evaluation_text(values)
        log.info('step %d/%d  %s in %.1f s', step, self._num_steps, text, seconds)

    def _warn_of_other_images(self, values):
        """Warns if an evaluator has scored another number of images than before."""
        for name in values:
            if not name.endswith(_COUNT):
                continue
            counts = list(metrics.scores(self._metrics.rows, name).values())
            if counts and counts[-1] != values[name]:
                log.warning(
                    'evaluated %d images, but %d before: the split has changed, and earlier '
                    'evaluations are not comparable',
                    values[name],
                    counts[-1],
                )

    def _evaluation_text(self, values):
        """Text such as 'eval accuracy 50.00 %  loss 0.7000  on 360 images' for an evaluation."""
        parts = []
        for name, metric in self._described.items():
            if name not in values or not metric.is_shown(self._num_classes):
                continue
            words = name
            if name.startswith(f'{metric_lib.MAIN}/'):
                words = metric.words
            suffix = ''
            if name == self._headline:
                words = f'eval {metric.words}'
                suffix = self._missing
            parts.append(f'{words} {metric.text(values[name])}{suffix}')
        count = values.get(metric_lib.MAIN + _COUNT)
        if count is not None:
            parts.append(f'on {count:.0f} images')
        return '  '.join(parts)

    def has_evaluation(self, step: int) -> bool:
        """Whether the main evaluator has scored the model after `step`."""
        return self.has_values(step, metric_lib.MAIN)

    def has_values(self, step: int, evaluator: str) -> bool:
        """Whether the evaluator with this name has scored the model after `step`."""
        names = set().union(*(row for row in self._metrics.rows if row['step'] == step))
        names.discard(descriptions.SECONDS)
        return any(name.startswith(f'{evaluator}/') for name in names)

    def is_complete(self, step: int) -> bool:
        """Whether the run is finished after `step`: by its length, or because of `patience`."""
        if self.has_lost_patience():
            return True
        return step == self._num_steps and self.has_evaluation(step)

    def has_lost_patience(self) -> bool:
        """Whether the last `patience` evaluations did not improve the best metric."""
        return 0 < self._patience <= self._scores.since_best()

    def save(self, step: int, state: PyTree, values: dict[str, Array]) -> None:
        """Starts saving the state after `step`, as soon as its rows of metrics are on disk.

        The `values` of the step must be finite.
        """
        self._add_loss(step, values)
        try:
            self._metrics.sync()
        except UserError as error:
            raise UserError(
                f'{error} {self._checkpoints.last_good()}', kind=error.kind, file=error.file
            ) from error
        extra = {'interval': self._mean_loss.as_json(), 'metrics': self._metrics.summary()}
        self._checkpoints.save(step, state, extra, self._scores)

    @contextlib.contextmanager
    def saved_if_it_fails(
        self, step: int, state: PyTree, values: dict[str, Array]
    ) -> Iterator[None]:
        """Saves the state if an error leaves this context, unless training has diverged.

        A failed evaluation then loses no steps.
        """
        try:
            yield
        except DivergedError:
            raise
        except Exception:
            if consensus.count() == 1:  # processes without an error would not save
                self.save(step, state, values)
            raise

    def require_finite(self, step: int, values: Mapping[str, Array | float]) -> None:
        """Raises DivergedError unless all values of FINITE are finite.

        The message names the last checkpoint.
        """
        checked = {name: float(values[name]) for name in FINITE if name in values}
        if all(map(math.isfinite, checked.values())):
            return
        self._checkpoints.wait(self._scores)
        words = ', '.join(f'{name} is {value:g}' for name, value in checked.items())
        raise DivergedError(
            f'{words} at step {step}. {self._checkpoints.last_good()} With another '
            '--workdir, lower optimizer.learning_rate, raise '
            'optimizer.warmup_steps, or set optimizer.clip_norm.',
            value=checked,
        )

    def conclude(self, step: int, received: signal.Signals | None) -> None:
        """Waits until everything is on disk, and logs how the run ended.

        Args:
          step: number of trained steps.
          received: the signal that stopped the run, or None.
        """
        self._line.close()
        last_saved = self._checkpoints.wait(self._scores)
        if self.is_complete(step):
            if step < self._num_steps:
                log.info(
                    'stopped early after step %d of %d: %s has not improved in %d '
                    'evaluations. To continue, raise patience.',
                    step,
                    self._num_steps,
                    self._scores.metric,
                    self._patience,
                )
            log.info('%s', self._outcome(step))
            self._trackers.close(complete=True)
            return
        assert received is not None  # only a signal stops a run that is not complete
        saved = 'and saved' if last_saved == step else 'before there was anything to save'
        log.warning(
            'stopped by %s after step %d of %d %s. To continue, run the same command again.',
            received.name,
            step,
            self._num_steps,
            saved,
        )

    def _outcome(self, step):
        """The result of the run, its duration and the paths of its files."""
        seconds = progress.taken(self._metrics.rows, self.meter.batch_size)
        lines = [
            f'done: {step} steps in {progress.duration(seconds)}, eval '
            f'{self._last_headline()}{self._missing}{self._worst}'
        ]
        best = self._scores.best()
        if best is not None:
            value = self._scores.meaning.text(self._scores.values[best])
            lines.append(f'  best        {self._scores.metric} {value} at step {best}')
        best_saved = self._checkpoints.best_saved(self._scores)
        files = {'checkpoint': os.path.join(self._checkpoints.directory, str(step))}
        if best_saved not in (None, step):
            files['best saved'] = os.path.join(self._checkpoints.directory, str(best_saved))
        files['curves'] = os.path.join(self._workdir, curves.FILE)
        files['metrics'] = self._metrics.path
        for name, path in files.items():
            if os.path.exists(path):
                lines.append(f'  {name:10}  {path}')
        return '\n'.join(lines)

    def close(self) -> None:
        """Closes the files; the caller closes the checkpoints."""
        self._line.close()
        self._trackers.close(complete=False)  # without effect after `conclude`
        self._metrics.close()
