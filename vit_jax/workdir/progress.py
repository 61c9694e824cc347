"""The speed of a run, its use of the machine, and its remaining time."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping

import jax

from vit_jax.workdir import memory

# Time of an evaluation batch, as a fraction of a training step: the forward pass has a third of the
# FLOPs.
FORWARD = 1 / 3


class Meter:
    """Measures a training loop between two reports."""

    def __init__(
        self,
        batch_size: int,
        num_steps: int,
        flops_per_step: float,
        peak_flops: float | None,
        evaluations: int = 0,
        batches_per_evaluation: int = 0,
    ):
        """Starts to measure.

        Args:
          batch_size: images per step.
          num_steps: number of steps of the run.
          flops_per_step: FLOPs of a step, forward and backward, on all devices.
          peak_flops: FLOP/s of one device; None if unknown.
          evaluations: number of remaining evaluations, for `estimate`.
          batches_per_evaluation: number of batches of an evaluation, for `estimate`.
        """
        self.batch_size = batch_size
        self._num_steps = num_steps
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops
        self._evaluations = evaluations
        self._batches_per_evaluation = batches_per_evaluation
        self.start(0)

    def timed(self, batches: Iterable) -> Iterator:
        """Yields the batches and measures the time spent waiting for them."""
        start = time.perf_counter()
        for batch in batches:
            self._waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def start(self, step: int) -> None:
        """Starts a new interval after `step` steps."""
        self._first_step = step
        self._start_time = time.perf_counter()
        self._waited = 0.0
        self._paused = 0.0

    def pause(self, seconds: float) -> None:
        """Excludes time that was not training, such as an evaluation, from the interval."""
        self._paused += seconds

    def seconds(self) -> float:
        """Seconds since `start`."""
        return time.perf_counter() - self._start_time

    def speed(self, step: int) -> dict[str, float]:
        """The speed since `start`.

        Returns:
          images_per_sec; data_wait, the share of the time spent waiting for data, 0 to 1; eta_sec;
          flops_per_sec, of the model on all devices.
        """
        seconds = max(time.perf_counter() - self._start_time - self._paused, 1e-9)
        steps_per_sec = (step - self._first_step) / seconds
        return {
            'images_per_sec': steps_per_sec * self.batch_size,
            'data_wait': self._waited / seconds,
            'eta_sec': (self._num_steps - step) / steps_per_sec if steps_per_sec else 0.0,
            'flops_per_sec': steps_per_sec * self._flops_per_step,
        }

    def estimate(self, step: int, seconds_per_step: float) -> str:
        """A sentence with the remaining duration of the run after `step`, including evaluations."""
        steps_left = self._num_steps - step
        forward_steps = self._evaluations * self._batches_per_evaluation * FORWARD
        total = seconds_per_step * (steps_left + forward_steps)
        evaluations = 'evaluation' if self._evaluations == 1 else f'{self._evaluations} evaluations'
        return (
            f'about {rough_duration(total)} for the {steps_left} steps left and the {evaluations}: '
            f'{seconds_per_step:.2g} s a step of {self.batch_size} images'
        )

    def report(self, step: int) -> dict[str, float]:
        """Measures the speed since `start` and starts a new interval.

        Returns:
          The values of `speed`; memory_gb, the peak memory; mfu, the share of the devices' peak
          FLOP/s, if the peak is known.
        """
        values = self.speed(step) | {'memory_gb': peak_memory() / 1e9}
        if self._peak_flops:
            values['mfu'] = values['flops_per_sec'] / (self._peak_flops * jax.device_count())
        self.start(step)
        return values


def taken(rows: Iterable[Mapping[str, float]], batch_size: int) -> float:
    """Seconds of training and evaluation according to all rows of the metrics of a run.

    The seconds include the time before an interruption, but not the time of starting and compiling.
    Values that are not finite are ignored: an edited file may contain them.
    """
    seconds = 0.0
    step = 0
    for row in rows:
        evaluation = row.get('eval/seconds', 0.0)
        if math.isfinite(evaluation):
            seconds += evaluation
        speed = row.get('train/images_per_sec', 0.0)
        if math.isfinite(speed) and speed > 1e-9:
            seconds += (row['step'] - step) * batch_size / speed
            step = int(row['step'])
    return seconds


def peak_memory() -> int:
    """Peak bytes of the fullest local device, or of the process if devices do not report them."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(s and 'peak_bytes_in_use' in s for s in stats):
        return max(s['peak_bytes_in_use'] for s in stats)
    return memory.peak_resident()


def describe(step: int, num_steps: int, values: dict[str, float]) -> str:
    """The log line of a training row."""
    mfu = f'  MFU {values["mfu"]:.1%}' if 'mfu' in values else ''
    return (
        f'step {step}/{num_steps}  loss {values["loss"]:.4f}  '
        f'lr {values["learning_rate"]:.2e}  grad norm {values["grad_norm"]:.3f}  '
        f'{values["images_per_sec"]:,.0f} images/s  waiting for data {values["data_wait"]:.0%}'
        f'{mfu}  ETA {duration(values["eta_sec"])}'
    )


def live(step: int, num_steps: int, loss: float | None, score: str, speed: dict[str, float]) -> str:
    """The live line after `step`, 80 columns wide for a run of a million steps.

    A narrow terminal cuts off the end, so the most important parts come first.

    Args:
      step: number of trained steps.
      num_steps: number of steps of the run.
      loss: mean training loss, or None.
      score: the last evaluation in words, or ''.
      speed: the result of Meter.speed.
    """
    parts = [f'{step}/{num_steps} {step / num_steps:.0%}']
    if loss is not None:
        parts.append(f'loss {loss:.4f}')
    if score:
        parts.append(score)
    if speed['images_per_sec']:
        parts.append(f'{speed["images_per_sec"]:,.0f} images/s')
    if speed['eta_sec']:
        parts.append(f'ETA {duration(speed["eta_sec"])}')
    return '  '.join(parts)


def duration(seconds: float) -> str:
    """Formats a duration as '1d 02:03:04' or '02:03:04'."""
    days, rest = divmod(int(seconds), 86_400)
    clock = f'{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}'
    if days:
        return f'{days}d {clock}'
    return clock


def rough_duration(seconds: float) -> str:
    """Formats a duration as '2 h 10 min', with at most two units."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f'{round(seconds)} s'
    if minutes < 60:
        return f'{minutes} min'
    if minutes < 24 * 60:
        return f'{minutes // 60} h {minutes % 60} min'
    hours = round(seconds / 3600)
    return f'{hours // 24} d {hours % 24} h'
