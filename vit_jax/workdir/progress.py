"""How fast a run is, how much of the machine it uses, and when it will be done."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping

import jax

from vit_jax.workdir import memory

# Time of a batch in evaluation, in training steps: the forward pass is a third of the products.
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
        """For a model of `flops_per_step`, forward and backward.

        `peak_flops` is the FLOP/s of one device, None where it is not known. So many `evaluations`
        are left, for `estimate`.
        """
        self._evaluations = evaluations
        self._batches_per_evaluation = batches_per_evaluation
        self.batch_size, self._num_steps = batch_size, num_steps
        self._flops_per_step, self._peak_flops = flops_per_step, peak_flops
        self.start(0)

    def timed(self, batches: Iterable) -> Iterator:
        """The same batches; the time spent in waiting for them counts as data wait."""
        start = time.perf_counter()
        for batch in batches:
            self._waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()

    def start(self, step: int) -> None:
        """Begins a new interval after `step` steps."""
        self._first, self._since = step, time.perf_counter()
        self._waited = self._paused = 0.0

    def pause(self, seconds: float) -> None:
        """Excludes time that was not training, such as an evaluation, from the interval."""
        self._paused += seconds

    def seconds(self) -> float:
        """Seconds since `start`."""
        return time.perf_counter() - self._since

    def speed(self, step: int) -> dict[str, float]:
        """What `report` says of the time since `start`, which goes on."""
        seconds = max(time.perf_counter() - self._since - self._paused, 1e-9)
        steps_per_sec = (step - self._first) / seconds
        return {
            'images_per_sec': steps_per_sec * self.batch_size,
            'data_wait': self._waited / seconds,
            'eta_sec': (self._num_steps - step) / steps_per_sec if steps_per_sec else 0.0,
            'flops_per_sec': steps_per_sec * self._flops_per_step,
        }

    def estimate(self, step: int, seconds_per_step: float) -> str:
        """How long the run takes after `step`, evaluations included, whose time follows."""
        left = self._num_steps - step
        forward_steps = self._evaluations * self._batches_per_evaluation * FORWARD
        total = seconds_per_step * (left + forward_steps)
        evaluations = 'evaluation' if self._evaluations == 1 else f'{self._evaluations} evaluations'
        return (
            f'about {rough_duration(total)} for the {left} steps left and the {evaluations}: '
            f'{seconds_per_step:.2g} s a step of {self.batch_size} images'
        )

    def report(self, step: int) -> dict[str, float]:
        """Speed per second of training since `start`, and starts again.

        images_per_sec, data_wait (share of the time, 0 to 1), eta_sec, flops_per_sec (of the model,
        all devices), mfu (share of the devices' peak, where known), memory_gb.
        """
        values = self.speed(step) | {'memory_gb': peak_memory() / 1e9}
        if self._peak_flops:
            values['mfu'] = values['flops_per_sec'] / (self._peak_flops * jax.device_count())
        self.start(step)
        return values


def taken(rows: Iterable[Mapping[str, float]], batch_size: int) -> float:
    """Seconds of training and evaluation, by all rows of the metrics of a run.

    So also those before it was interrupted; not those of starting and compiling. Values that no
    clock measures, such as NaN, count nothing: a file may have them.
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
    """Peak bytes of the fullest local device; of this process where devices do not tell."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(s and 'peak_bytes_in_use' in s for s in stats):
        return max(s['peak_bytes_in_use'] for s in stats)
    return memory.peak_resident()


def describe(step: int, num_steps: int, values: dict[str, float]) -> str:
    """One line for the log from the values of a training row."""
    mfu = f'  MFU {values["mfu"]:.1%}' if 'mfu' in values else ''
    return (
        f'step {step}/{num_steps}  loss {values["loss"]:.4f}  '
        f'lr {values["learning_rate"]:.2e}  grad norm {values["grad_norm"]:.3f}  '
        f'{values["images_per_sec"]:,.0f} images/s  waiting for data {values["data_wait"]:.0%}'
        f'{mfu}  ETA {duration(values["eta_sec"])}'
    )


def live(step: int, num_steps: int, loss: float | None, score: str, speed: dict[str, float]) -> str:
    """The live line after `step`: mean loss, the last `score` in words and speed, where known.

    Of a run of a million steps it has 80 columns; what a narrow terminal cuts off comes last.
    """
    return '  '.join(
        [
            f'{step}/{num_steps} {step / num_steps:.0%}',
            *([f'loss {loss:.4f}'] if loss is not None else []),
            *([score] if score else []),
            *([f'{speed["images_per_sec"]:,.0f} images/s'] if speed['images_per_sec'] else []),
            *([f'ETA {duration(speed["eta_sec"])}'] if speed['eta_sec'] else []),
        ]
    )


def duration(seconds: float) -> str:
    """'1d 02:03:04' or '02:03:04'."""
    days, rest = divmod(int(seconds), 86_400)
    clock = f'{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}'
    return f'{days}d {clock}' if days else clock


def rough_duration(seconds: float) -> str:
    """'2 h 10 min', of the two largest units that matter."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f'{round(seconds)} s'
    if minutes < 60:
        return f'{minutes} min'
    if minutes < 24 * 60:
        return f'{minutes // 60} h {minutes % 60} min'
    hours = round(seconds / 3600)
    return f'{hours // 24} d {hours % 24} h'
