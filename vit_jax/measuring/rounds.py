"""Times several subjects in alternation, so that other load on the machine affects all of them."""

import argparse
import collections
import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vit_jax.errors import UserError, check_at_least
from vit_jax.workdir import memory

# The first steps on a CPU are slow, because some of them need new memory from the system. With S/16
# in float32 on a virtual machine a step with 0.75 GB of new memory took 4.0 s instead of 2.0 s, and
# the last such step was the 24th.
WARM_UP_STEPS = 8
MOST_WARM_UPS = 5


class Timing(NamedTuple):
    """Seconds of a step: the median, the fastest and the slowest of all rounds."""

    median: float
    fastest: float
    slowest: float


def check(options: argparse.Namespace) -> None:
    """Raises UserError unless --rounds and --seconds, the length of a turn, are positive."""
    check_at_least('--rounds', options.rounds, 1)
    if not 0 < options.seconds < math.inf:
        raise UserError(
            f'--seconds is {options.seconds}: expected a finite number above 0.',
            kind='value',
            field='--seconds',
            value=options.seconds,
        )


def in_turn(
    subjects: Mapping[str, Callable[[int], float]], rounds: int, seconds: float
) -> dict[str, Timing]:
    """Times a step of every subject.

    Args:
      subjects: functions that compute a number of steps and return the seconds that they took. The
        first WARM_UP_STEPS steps do not count; more such steps follow while memory grows.
      rounds: number of rounds. Every subject has a turn in each round, and each round starts with
        another subject.
      seconds: approximate length of a turn, which is at least one step.
    """
    step_counts = {}
    for name, run in subjects.items():
        _warm_up(run)
        step_counts[name] = _num_steps(run, seconds)
    step_seconds: dict[str, list[float]] = {name: [] for name in subjects}
    names = collections.deque(subjects)
    for _ in range(rounds):
        for name in names:
            count = step_counts[name]
            step_seconds[name].append(subjects[name](count) / count)
        names.rotate(-1)
    return {
        name: Timing(statistics.median(values), min(values), max(values))
        for name, values in step_seconds.items()
    }


def _warm_up(run):
    for _ in range(MOST_WARM_UPS):
        before = memory.peak_resident()
        run(WARM_UP_STEPS)
        if memory.peak_resident() < 1.01 * before:
            return


def _num_steps(run, seconds):
    """The number of steps of a subject that take about `seconds`."""
    count = 1
    elapsed = run(count)
    while elapsed < seconds / 10:
        count *= 2
        elapsed = run(count)
    if count > 1:  # the first steps may have come from a queue, which is empty now
        elapsed = run(count)
    return max(1, round(count * seconds / elapsed))
