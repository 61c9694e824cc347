"""What a run writes while it trains: its progress, metrics, curves and checkpoints, in step."""

import logging
import math
import os
import signal
import sys

from jaxtyping import Array, PyTree
from tqdm import tqdm

from vit_jax.errors import DivergedError
from vit_jax.processes import consensus
from vit_jax.workdir import curves, progress
from vit_jax.workdir.checkpoint import Checkpointer
from vit_jax.workdir.metrics import MetricsLog

log = logging.getLogger(__name__)


class Outputs:
    """The open files of a run of `num_steps` steps that begins at or continues from `step`."""

    def __init__(self, workdir: str, step: int, num_steps: int, checkpoints: Checkpointer,
                 meter: progress.Meter):
        self.meter = meter
        self._workdir, self._num_steps, self._checkpoints = workdir, num_steps, checkpoints
        self._metrics = MetricsLog(workdir, step)
        self._bar = tqdm(total=num_steps, initial=step, unit='step', delay=1,
                         disable=not (consensus.is_main() and sys.stderr.isatty()))

    def advance(self, step: int, values: dict[str, Array] | None) -> None:
        """Shows that a new step has started; `values` of the one before, `step`, must be finite.

        They are read while the devices are busy with the new step.
        """
        self._bar.update()
        if values is not None:
            self.require_finite(step, values)

    def log(self, step: int, values: dict[str, Array]) -> None:
        """Writes the values of a training step with the speed since the previous call."""
        self.require_finite(step, values)  # waits for the step, so that the time is right
        values = {name: float(value) for name, value in values.items()} | self.meter.report(step)
        self._metrics.write(step, {f'train/{name}': value for name, value in values.items()})
        log.info('%s', progress.describe(step, self._num_steps, values))

    def log_evaluation(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Writes the result and duration of an evaluation, and draws the curves."""
        self._metrics.write(step, values | {'eval/seconds': seconds})
        if consensus.is_main():
            curves.draw(self._metrics.rows, self._workdir)
        log.info('step %d/%d  eval accuracy %.2f %%  top-5 %.2f %%  loss %.4f  on %d images in '
                 '%.1f s', step, self._num_steps, 100 * values['eval/accuracy'],
                 100 * values['eval/accuracy_top5'], values['eval/loss'],
                 values['eval/num_examples'], seconds)

    def has_evaluation(self, step: int) -> bool:
        """Whether the model after `step` has been evaluated."""
        return any(row['step'] == step and 'eval/loss' in row for row in self._metrics.rows)

    def save(self, step: int, state: PyTree, values: dict[str, Array],
             evaluation: dict[str, float] | None) -> None:
        """Starts saving the state after `step`, once its rows of metrics are on disk.

        The `values` of the step must be finite. Its `evaluation` decides which checkpoint is best.
        """
        self.require_finite(step, values)
        self._metrics.sync()
        self._checkpoints.save(step, state, evaluation)

    def require_finite(self, step: int, values: dict[str, Array]) -> None:
        """Raises DivergedError, which names the last checkpoint, if values are not finite."""
        loss, grad_norm, update_norm = (
            float(values[name]) for name in ('loss', 'grad_norm', 'update_norm'))
        if all(map(math.isfinite, (loss, grad_norm, update_norm))):
            return
        last = self._checkpoints.wait()
        kept = ('No checkpoint had been written yet.' if last is None else
                f'The last good checkpoint, of step {last}, is in {self._checkpoints.directory}.')
        raise DivergedError(f'the loss is {loss}, the gradient norm {grad_norm} and the update '
                            f'norm {update_norm} at step {step}. {kept} With another --workdir, '
                            'lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or '
                            'set optimizer.clip_norm.')

    def conclude(self, step: int, received: signal.Signals | None) -> None:
        """Waits until everything is on disk, and logs how the run ended: early if by a signal."""
        self._bar.close()
        last = self._checkpoints.wait()
        if step == self._num_steps and self.has_evaluation(step):
            log.info('done: %d steps\n  curves      %s\n  checkpoint  %s\n  metrics     %s', step,
                     os.path.join(self._workdir, curves.FILE),
                     os.path.join(self._checkpoints.directory, str(step)), self._metrics.path)
            return
        saved = 'and saved' if last == step else 'before there was anything to save'
        log.warning('stopped by %s after step %d of %d %s. To continue, run the same command '
                    'again.', received.name, step, self._num_steps, saved)

    def close(self) -> None:
        """Closes the files, but not the checkpoints, which the caller has opened."""
        self._bar.close()
        self._metrics.close()
