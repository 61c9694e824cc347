"""Turns minutes into steps, by timing a few steps on this machine."""

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.measuring import workloads
from vit_jax.parallel import sharding
from vit_jax.training import accumulation, resolve
from vit_jax.training.program import Program

log = logging.getLogger(__name__)

RATES = (0.001, 0.003, 0.01)  # learning rates that are tried
RATE = 0.003  # without time for tries
# Shares of the seconds for fine-tuning: each short run, and the long one.
_SHARE_OF_A_TRY = 0.1
_SHARE_OF_THE_RUN = 0.55
_SHARE_WITHOUT_TRIES = 0.9
_LEAST_SECONDS = 60.0  # for fine-tuning: less is hardly time to compile a step
_MOST_EPOCHS = 30.0  # of the long run: small sets learn no more from further ones
_MOST_EPOCHS_OF_A_TRY = 5.0
_FEWEST_STEPS = 10  # of a try: fewer tell nothing
_LARGER_IMAGES = 9 / 7  # 288 px for weights of 224 px
_EPOCHS_FOR_LARGER_IMAGES = 8.0  # that the long run must still have
_AUGMENTED_BELOW = 2000  # training images: larger sets are varied enough
_EPOCHS_FOR_AUGMENTATION = 10.0
_TIMED_STEPS = 3
_LEAST_START = 15.0  # seconds for the start and the end of a run, without compiling and steps
_EVALUATION_OF_A_STEP = 0.4  # time to evaluate an image, relative to training with it


class Step(NamedTuple):
    """The size of a training step.

    Attributes:
      image_size: (height, width) in pixels.
      batch_size: images of a step.
      accum_steps: parts of the batch; 0 leaves the choice to the run, which compiles to choose.
    """

    image_size: tuple[int, int]
    batch_size: int
    accum_steps: int = 0


class Measured(NamedTuple):
    """A training step on this machine.

    Attributes:
      seconds: of a step.
      start: seconds in which a run compiles, starts and ends.
      accum_steps: parts of the batch that fit into the memory.
    """

    seconds: float
    start: float
    accum_steps: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The runs that fit into the available time.

    Attributes:
      image_size: (height, width) in pixels.
      batch_size: images of a step.
      accum_steps: parts of the batch; 0 if nothing is trained.
      seconds_per_step: as measured here, with its share of the evaluations.
      seconds_per_start: seconds in which a run compiles, starts and ends.
      try_steps: steps of each short run; 0 if there is no time for short runs.
      run_steps: steps of the long run; 0 if there is time for the linear probe alone.
      rates: the learning rates of the short runs, or the one of the long run without them.
      tries_augmentation: whether one more short run uses RandAugment and MixUp.
    """

    image_size: tuple[int, int]
    batch_size: int
    accum_steps: int
    seconds_per_step: float
    seconds_per_start: float
    try_steps: int
    run_steps: int
    rates: tuple[float, ...]
    tries_augmentation: bool

    def seconds(self) -> float:
        """How long all runs take."""
        tries = 0
        if self.try_steps:
            tries = len(self.rates) + self.tries_augmentation
        steps = tries * self.try_steps + self.run_steps
        return steps * self.seconds_per_step + (tries + 1) * self.seconds_per_start

    def step(self) -> Step:
        """The size of a training step of all runs."""
        return Step(self.image_size, self.batch_size, self.accum_steps)

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)


def from_json(fields: Mapping[str, Any]) -> Plan:
    """The plan that `as_json` has written."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return Plan(**values)


def batch_size_for(num_train: int, platform: str, devices: int) -> int:
    """Images of a step: a power of two that gives a small set enough steps in an epoch.

    Args:
      num_train: training images.
      platform: 'cpu', 'gpu' or 'tpu'.
      devices: how many share a step; each has the same number of images.
    """
    most = 32 if platform == 'cpu' else 256
    size = max(4, min(most, 2 ** int(math.log2(max(4, num_train / 8)))))
    return max(devices, size // devices * devices)


def measure(config: ConfigDict) -> Measured:
    """Compile and time a training step of a config."""
    complete = workloads.complete(config)
    mesh = sharding.make_mesh(complete.mesh)
    complete = resolve.for_mesh(complete, mesh)
    program = Program(complete, mesh)
    if not complete.accum_steps:
        program = accumulation.choose(program)
        program = program.with_accum_steps(program.config.accum_steps)  # to time its compilation
    begin = time.monotonic()
    step = workloads.training(program)
    compile_seconds = time.monotonic() - begin
    seconds = step.run(_TIMED_STEPS) / _TIMED_STEPS
    return Measured(seconds, compile_seconds + _LEAST_START, program.config.accum_steps)


def make_plan(
    config: ConfigDict, seconds: float, num_train: int, num_held_out: int, side_of_photos: int
) -> Plan:
    """Choose what fits into the time.

    Args:
      config: of the training, with the size of the weights' images and the batch size.
      seconds: for all of fine-tuning.
      num_train: training images.
      num_held_out: images of the validation split, which is scored after each epoch.
      side_of_photos: the median of their shorter sides, in pixels.
    """
    size = tuple(config.image_size)
    if seconds < _LEAST_SECONDS:
        return _without_training(size, config.batch_size)
    begin = time.monotonic()
    step = measure(config)
    plan = _plan_for(config, step, seconds, num_train, num_held_out)
    larger = _larger(config)
    if side_of_photos >= min(larger) and plan.run_steps:
        larger_config = config_lib.changed(config, {'image_size': larger})
        ratio = math.prod(larger) / math.prod(size)
        expected = step._replace(seconds=ratio * step.seconds)
        left = seconds - 2 * (time.monotonic() - begin)  # for measuring the larger size
        affordable = _plan_for(larger_config, expected, left, num_train, num_held_out)
        if _epochs(affordable, num_train) >= _EPOCHS_FOR_LARGER_IMAGES:
            return _plan_for(larger_config, measure(larger_config), left, num_train, num_held_out)
    return plan


def steps_in(plan: Plan, seconds: float) -> int:
    """Steps of the long run of a plan that fit into some seconds; 0 if there is no use in it."""
    steps = min(plan.run_steps, int((seconds - plan.seconds_per_start) / plan.seconds_per_step))
    return steps if steps >= min(_FEWEST_STEPS, plan.run_steps) else 0


def _larger(config):
    patch = config.model.patch_size if 'patch_size' in config.model else (32, 32)
    rows, columns = (patch, patch) if isinstance(patch, int) else patch
    height, width = config.image_size
    return (
        round(height * _LARGER_IMAGES / rows) * rows,
        round(width * _LARGER_IMAGES / columns) * columns,
    )


def _epochs(plan, num_train):
    return plan.run_steps * plan.batch_size / num_train


def _plan_for(config, step, seconds, num_train, num_held_out):
    size = tuple(config.image_size)
    batch_size = config.batch_size
    steps_of_epoch = num_train / batch_size
    evaluated = _EVALUATION_OF_A_STEP * num_held_out / num_train
    seconds_per_step = step.seconds * (1 + evaluated)

    def steps(share, most_epochs):
        affordable = int((share * seconds - step.start) / seconds_per_step)
        return min(affordable, math.ceil(most_epochs * steps_of_epoch))

    rates = RATES
    try_steps = steps(_SHARE_OF_A_TRY, _MOST_EPOCHS_OF_A_TRY)
    run_steps = steps(_SHARE_OF_THE_RUN, _MOST_EPOCHS)
    if try_steps < _FEWEST_STEPS:
        rates = (RATE,)
        try_steps = 0
        run_steps = steps(_SHARE_WITHOUT_TRIES, _MOST_EPOCHS)
    if run_steps < _FEWEST_STEPS:
        return _without_training(size, batch_size, seconds_per_step)
    is_small = num_train < _AUGMENTED_BELOW
    enough = run_steps >= _EPOCHS_FOR_AUGMENTATION * steps_of_epoch
    return Plan(
        image_size=size,
        batch_size=batch_size,
        accum_steps=step.accum_steps,
        seconds_per_step=seconds_per_step,
        seconds_per_start=step.start,
        try_steps=try_steps,
        run_steps=run_steps,
        rates=rates,
        tries_augmentation=is_small and enough and try_steps > 0,
    )


def _without_training(size, batch_size, seconds_per_step=0.0):
    return Plan(size, batch_size, 0, seconds_per_step, 0.0, 0, 0, (), False)
