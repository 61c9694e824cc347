"""What a run writes while it trains: its progress, metrics, curves and checkpoints, in step."""

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping

from jaxtyping import Array, PyTree
from ml_collections import ConfigDict

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
_LONG_READ = 2  # seconds for a batch after which the live line says so
_TOO_LONG_READ = 60  # and the log
_TELLING = 3  # seconds of steps that tell how long the run takes

FINITE = ('loss', 'grad_norm', 'update_norm', 'eval/loss')  # else training has diverged


class Outputs:
    """What a run of `num_steps` steps writes from its first step, or from where it resumes."""

    def __init__(
        self,
        workdir: str,
        start: Snapshot,
        num_steps: int,
        checkpoints: Checkpointer,
        rows: MetricsLog,
        meter: progress.Meter,
        num_classes: int,
        best_metric: str = metrics.ACCURACY,
        patience: int = 0,
        described: Mapping[str, Metric] | None = None,
    ):
        """Nothing is written before a method is called.

        Args:
          start: where the run begins or resumes.
          checkpoints: which the caller closes.
          rows: opened at the step of `start`; closed by `close`.
          best_metric: of which value the best checkpoint has the best.
          patience: evaluations without a better one that end the run; 0: none do.
          described: the metrics of its evaluations; None: those of a classifier.
        """
        self.meter = meter
        self._num_classes = num_classes
        self._patience = patience
        self._workdir = workdir
        self._num_steps = num_steps
        self._checkpoints = checkpoints
        self._described = described or metric_lib.described(metric_lib.MAIN, classification.METRICS)
        self._headline = descriptions.headline(self._described)
        self._metrics = rows
        self._scores = scores_lib.of_rows(rows.rows, best_metric, self._described.get(best_metric))
        # Of the training loss since the last row of it, as the checkpoint has it.
        interval = start.extra.get('interval', {})
        self._sum = interval.get('sum', 0.0)
        self._steps = interval.get('steps', 0)
        self._counted = start.step
        # Of the last evaluation, as log_evaluation takes them.
        self._missing = self._worst = ''
        self._line = LiveLine()
        # (step, time) at which the first step of this start began
        self._started: tuple[int, float] | None = None
        self._evaluation_seconds = 0.0
        self._has_estimate = False
        self._has_warned_of_data = False
        self._trackers = Trackers((), workdir, {})

    def track(self, config: ConfigDict) -> None:
        """Gives the rows from now on to config.trackers too; UserError where one cannot begin."""
        self._trackers = Trackers(config.trackers, self._workdir, config)

    def show(self, what: str) -> None:
        """Says on a terminal what is being done, when it is not a step of training."""
        self._line.show(what, at_once=True)

    def wait_for_batch(self, seconds: float) -> None:
        """Says that the next batch has not come for some seconds."""
        which = 'first' if self._started is None else 'next'
        if seconds > _LONG_READ:
            self.show(f'waiting for the {which} batch, {seconds:.0f} s')
        if seconds > _TOO_LONG_READ and not self._has_warned_of_data:
            self._has_warned_of_data = True
            log.warning(
                'the %s batch has not come for %.0f s: the data are slow, or a file does not '
                'answer. Ctrl-C saves and stops.',
                which,
                seconds,
            )

    def begin_first_step(self, step: int, compile_seconds: float) -> None:
        """Says what is waited for from now on: the first step after `step`, the first of a start.

        `compile_seconds` is what it took to compile it.
        """
        now = time.perf_counter()
        self._started = step, now
        done = [f'the first batch was read in {self.meter.seconds():.1f} s']
        if compile_seconds > 0.05:  # else choosing accum_steps has compiled it
            done.insert(0, f'compiled in {compile_seconds:.1f} s')
        log.info('waiting for the first step (%s)', ', '.join(done))
        self.wait_for_first_step(0.0)

    def wait_for_first_step(self, seconds: float) -> None:
        """Shows for how long the first step has been computed."""
        assert self._started is not None  # begin_first_step has set it
        step = self._started[0]
        done = f'{step}/{self._num_steps} {step / self._num_steps:.0%}'
        self.show(f'{done}  waiting for the first step, {seconds:.0f} s')

    def _estimate(self, step):
        """Says once how long the run takes, as soon as the steps until `step` tell."""
        first, begin = self._started
        seconds = time.perf_counter() - begin - self._evaluation_seconds
        if self._has_estimate or step in (first, self._num_steps) or seconds < _TELLING:
            return
        self._has_estimate = True
        log.info('%s', self.meter.estimate(step, seconds / (step - first)))

    def advance(self, step: int, values: dict[str, Array] | None) -> None:
        """Shows that a new step has started; `values` of the one before, `step`, must be finite.

        They are read while the devices are busy with the new step.
        """
        if values is not None:
            self._take(step, values)
        if self._started is not None:
            self._estimate(step)
        self._line.show(
            progress.live(
                step,
                self._num_steps,
                self._sum / self._steps if self._steps else None,
                self._last_headline(),
                self.meter.speed(step),
            )
        )

    def _last_headline(self):
        """'accuracy 98.61 %' of the last evaluation, '' before the first."""
        values = metrics.scores(self._metrics.rows, self._headline)
        if not values:
            return ''
        metric = self._described[self._headline]
        return f'{metric.words} {metric.text(list(values.values())[-1])}'

    def log(self, step: int, values: dict[str, Array]) -> None:
        """Writes the values of a training step with the speed since the previous call.

        The loss is the mean over all steps since then, whatever interrupted them.
        """
        self._take(step, values)  # waits for the step, so that the time is right
        row = {name: float(value) for name, value in values.items()}
        row |= {'loss': self._sum / self._steps} | self.meter.report(step)
        self._sum, self._steps = 0.0, 0
        self._write(step, {f'train/{name}': value for name, value in row.items()})
        log.log(
            logging.DEBUG if self._line.shown else logging.INFO,
            '%s',
            progress.describe(step, self._num_steps, row),
        )

    def _write(self, step, values):
        self._metrics.write(step, values)
        self._trackers.write(step, values)

    def _take(self, step, values):
        """Adds the loss of a step to those of the interval, once."""
        self.require_finite(step, values)
        if step > self._counted:
            self._counted, self._steps = step, self._steps + 1
            self._sum += float(values['loss'])

    def log_evaluation(
        self,
        step: int,
        values: dict[str, float],
        seconds: float,
        missing: str = '',
        worst: str = '',
    ) -> None:
        """Writes the result and duration of an evaluation, and draws the curves.

        The log also says which classes have no images (`missing`) and, at the end of the run, which
        class is the `worst`, both in words of per_class.PerClass, '' if there is nothing to say.
        """
        self._missing = f' ({missing})' if missing else ''
        self._worst = f', {worst}' if worst else ''
        self._evaluation_seconds += seconds
        values = consensus.from_main(lambda: values)  # what follows from them is to be the same
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
        log.info('step %d/%d  %s in %.1f s', step, self._num_steps, self._line_of(values), seconds)

    def _warn_of_other_images(self, values):
        """Warns if an evaluator has scored another number of images than before."""
        for name in values:
            if not name.endswith(_COUNT):
                continue
            before = [*metrics.scores(self._metrics.rows, name).values()][-1:]
            if before and before != [values[name]]:
                log.warning(
                    '%d images were evaluated, and %d before: the split has changed, and what '
                    'is best is not comparable',
                    values[name],
                    before[0],
                )

    def _line_of(self, values):
        """'eval accuracy 50.00 %  loss 0.7000  on 360 images' of the values of an evaluation."""
        parts = []
        for name, metric in self._described.items():
            if name not in values or not metric.is_shown(self._num_classes):
                continue
            if name == self._headline:
                words = f'eval {metric.words}'
                missing = self._missing
            else:
                words = metric.words if name.startswith(f'{metric_lib.MAIN}/') else name
                missing = ''
            parts.append(f'{words} {metric.text(values[name])}{missing}')
        count = values.get(metric_lib.MAIN + _COUNT)
        if count is not None:
            parts.append(f'on {count:.0f} images')
        return '  '.join(parts)

    def has_evaluation(self, step: int) -> bool:
        """Whether the main evaluator has scored the model after `step`."""
        return self.has_values(step, metric_lib.MAIN)

    def has_values(self, step: int, evaluator: str) -> bool:
        """Whether the evaluator of that name has scored the model after `step`."""
        return any(
            row['step'] == step
            and any(
                name.startswith(f'{evaluator}/') and name != descriptions.SECONDS for name in row
            )
            for row in self._metrics.rows
        )

    def is_complete(self, step: int) -> bool:
        """Whether nothing is left after `step`: the run is at its end, or has lost patience."""
        return self.has_lost_patience() or (step == self._num_steps and self.has_evaluation(step))

    def has_lost_patience(self) -> bool:
        """Whether so many evaluations were no better than one before; from the rows alone."""
        return 0 < self._patience <= self._scores.since_best()

    def save(self, step: int, state: PyTree, values: dict[str, Array]) -> None:
        """Starts saving the state after `step`, once its rows of metrics are on disk.

        The `values` of the step must be finite.
        """
        self._take(step, values)
        try:
            self._metrics.sync()
        except UserError as error:
            raise UserError(f'{error} {self._checkpoints.last_good()}') from error
        self._checkpoints.save(
            step,
            state,
            {
                'interval': {'sum': self._sum, 'steps': self._steps},
                'metrics': self._metrics.summary(),
            },
            self._scores,
        )

    @contextlib.contextmanager
    def saved_if_it_fails(
        self, step: int, state: PyTree, values: dict[str, Array]
    ) -> Iterator[None]:
        """Saves the state before an error leaves, unless training has diverged.

        So no steps are lost with their evaluation.
        """
        try:
            yield
        except DivergedError:
            raise
        except Exception:
            if consensus.count() == 1:  # others may have no error, and would not save
                self.save(step, state, values)
            raise

    def require_finite(self, step: int, values: Mapping[str, Array | float]) -> None:
        """Raises DivergedError, which names the last checkpoint, if a value of FINITE is not."""
        found = {name: float(values[name]) for name in FINITE if name in values}
        if all(map(math.isfinite, found.values())):
            return
        self._checkpoints.wait(self._scores)
        words = ', '.join(f'{name} is {value:g}' for name, value in found.items())
        raise DivergedError(
            f'{words} at step {step}. {self._checkpoints.last_good()} With another '
            '--workdir, lower optimizer.learning_rate, lengthen '
            'optimizer.warmup_steps, or set optimizer.clip_norm.'
        )

    def conclude(self, step: int, received: signal.Signals | None) -> None:
        """Waits until everything is on disk, and logs how the run ended: early if by a signal."""
        self._line.close()
        last = self._checkpoints.wait(self._scores)
        if self.is_complete(step):
            if step < self._num_steps:
                log.info(
                    'stopped early after step %d of %d: %s has not become better in %d '
                    'evaluations. To go on, raise patience.',
                    step,
                    self._num_steps,
                    self._scores.metric,
                    self._patience,
                )
            log.info('%s', self._outcome(step))
            self._trackers.close(complete=True)
            return
        assert received is not None  # a run that is not complete ends by a signal alone
        saved = 'and saved' if last == step else 'before there was anything to save'
        log.warning(
            'stopped by %s after step %d of %d %s. To continue, run the same command again.',
            received.name,
            step,
            self._num_steps,
            saved,
        )

    def _outcome(self, step):
        """What the run has reached, how long it took, and where the files are that there are."""

        def folder(step):
            return os.path.join(self._checkpoints.directory, str(step))

        rows = self._metrics.rows
        best = self._scores.best()
        saved = self._checkpoints.best_saved(self._scores)
        best_line = []
        if best is not None:
            value = self._scores.meaning.text(self._scores.values[best])
            best_line = [f'  best        {self._scores.metric} {value} at step {best}']
        files = {
            'checkpoint': folder(step),
            'best saved': '' if saved in (None, step) else folder(saved),
            'curves': os.path.join(self._workdir, curves.FILE),
            'metrics': self._metrics.path,
        }
        seconds = progress.taken(rows, self.meter.batch_size)
        return '\n'.join(
            [
                f'done: {step} steps in {progress.duration(seconds)}, eval '
                f'{self._last_headline()}{self._missing}{self._worst}',
                *best_line,
                *(f'  {name:10}  {path}' for name, path in files.items() if os.path.exists(path)),
            ]
        )

    def close(self) -> None:
        """Closes the files, but not the checkpoints, which the caller has opened."""
        self._line.close()
        self._trackers.close(complete=False)  # unless they are already
        self._metrics.close()
