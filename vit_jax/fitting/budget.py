"""How the minutes that there are become steps: by timing a few on this machine."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.measuring import workloads
from vit_jax.parallel import sharding
from vit_jax.training import accumulation, resolve
from vit_jax.training.program import Program

log = logging.getLogger(__name__)

RATES = (0.001, 0.003, 0.01)  # learning rates that are tried
# Of the seconds that are left for fine-tuning: each short run, and the long one.
_SHARE_OF_A_TRY, _SHARE_OF_THE_RUN = 0.12, 0.5
_MOST_EPOCHS = 30.0  # of the long run: small sets learn no more from further ones
_MOST_EPOCHS_OF_A_TRY = 5.0
_FEWEST_STEPS = 10  # of a try: fewer tell nothing
_LARGER_IMAGES = 9 / 7  # 288 px for weights of 224 px
_EPOCHS_FOR_LARGER_IMAGES = 8.0  # that the long run must still have
_AUGMENTED_BELOW = 2000  # training images: larger sets are varied enough
_EPOCHS_FOR_AUGMENTATION = 10.0
_TIMED_STEPS = 3
_STARTS = 25.0  # seconds in which a run starts and ends, besides its steps


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is trained in the time that there is.

    Attributes:
      image_size: (height, width) in pixels.
      batch_size: images of a step.
      seconds_per_step: as measured here.
      try_steps: steps of each short run; 0 if there is time for the linear probe alone.
      run_steps: steps of the long run.
      rates: the learning rates of the short runs.
      tries_augmentation: whether one more short run uses RandAugment and MixUp.
    """

    image_size: tuple[int, int]
    batch_size: int
    seconds_per_step: float
    try_steps: int
    run_steps: int
    rates: tuple[float, ...]
    tries_augmentation: bool

    def seconds(self) -> float:
        """How long all runs take."""
        tries = len(self.rates) + self.tries_augmentation
        steps = tries * self.try_steps + self.run_steps
        return steps * self.seconds_per_step + (tries + 1) * _STARTS

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


def measure(config: ConfigDict) -> float:
    """The seconds of a training step of a config, which is compiled."""
    complete = workloads.complete(config)
    mesh = sharding.make_mesh(complete.mesh)
    complete = resolve.for_mesh(complete, mesh)
    program = Program(complete, mesh)
    if not complete.accum_steps:
        program = accumulation.choose(program)
    step = workloads.training(program)
    return step.run(_TIMED_STEPS) / _TIMED_STEPS


def make_plan(config: ConfigDict, seconds: float, num_train: int, side_of_photos: int) -> Plan:
    """Choose what fits into the time.

    Args:
      config: of the training, with the size of the weights' images and the batch size.
      seconds: for all of fine-tuning.
      num_train: training images.
      side_of_photos: the median of their shorter sides, in pixels.
    """
    size = tuple(config.image_size)
    if _SHARE_OF_A_TRY * seconds < _STARTS:  # not even time to compile a step
        return _without_training(size, config.batch_size)
    seconds_per_step = measure(config)
    plan = _plan_for(size, config.batch_size, seconds_per_step, seconds, num_train)
    larger = _larger(config)
    if side_of_photos >= min(larger) and plan.run_steps:
        larger_config = config_lib.changed(config, {'image_size': larger})
        ratio = math.prod(larger) / math.prod(size)
        affordable = _plan_for(
            larger, config.batch_size, ratio * seconds_per_step, seconds, num_train
        )
        if _epochs(affordable, num_train) >= _EPOCHS_FOR_LARGER_IMAGES:
            return _plan_for(larger, config.batch_size, measure(larger_config), seconds, num_train)
    return plan


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


def _plan_for(size, batch_size, seconds_per_step, seconds, num_train):
    steps_of_epoch = num_train / batch_size
    most_run = math.ceil(_MOST_EPOCHS * steps_of_epoch)
    most_try = math.ceil(_MOST_EPOCHS_OF_A_TRY * steps_of_epoch)
    run_steps = int((_SHARE_OF_THE_RUN * seconds - _STARTS) / seconds_per_step)
    try_steps = int((_SHARE_OF_A_TRY * seconds - _STARTS) / seconds_per_step)
    run_steps = min(run_steps, most_run)
    try_steps = min(try_steps, most_try)
    if try_steps < _FEWEST_STEPS:
        return _without_training(size, batch_size, seconds_per_step)
    is_small = num_train < _AUGMENTED_BELOW
    enough = run_steps >= _EPOCHS_FOR_AUGMENTATION * steps_of_epoch
    return Plan(
        size, batch_size, seconds_per_step, try_steps, run_steps, RATES, is_small and enough
    )


def _without_training(size, batch_size, seconds_per_step=0.0):
    return Plan(size, batch_size, seconds_per_step, 0, 0, (), False)
