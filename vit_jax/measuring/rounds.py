"""Times several things in turn, so that what else the machine does meets all of them alike."""

import argparse
import collections
import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vit_jax.errors import UserError, check_at_least
from vit_jax.workdir import memory

# Steps of a warm-up, of which there are up to MOST_WARM_UPS. On a CPU the first steps are slow, as
# some ask the system for memory that it has not given yet: one of S/16 in float32 took 4.0 instead
# of 2.0 s with 0.75 GB of it (a virtual machine, whose host had to find it), the last of them as
# the 24th.
WARM_UP, MOST_WARM_UPS = 8, 5


class Timing(NamedTuple):
    """Seconds of a step: the median of all rounds, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float


def check(options: argparse.Namespace) -> None:
    """Raises UserError unless --rounds and --seconds, of a turn, are possible."""
    check_at_least('--rounds', options.rounds, 1)
    if not 0 < options.seconds < math.inf:
        raise UserError(f'--seconds is {options.seconds}: expected a finite number above 0.')


def in_turn(
    subjects: Mapping[str, Callable[[int], float]], rounds: int, seconds: float
) -> dict[str, Timing]:
    """The time of a step of every subject.

    Args:
      subjects: functions that compute a number of steps and return the seconds that they took. The
        first WARM_UP steps are not counted, nor as many further ones while they get more memory.
      rounds: in each of them every subject has its turn, another one first each time.
      seconds: about how long a turn takes, at least one step.
    """
    counts = {}
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for name, run in subjects.items():
        _warm_up(run)
        counts[name] = _steps(run, seconds)
    names = collections.deque(subjects)
    for _ in range(rounds):
        for name in names:
            found[name].append(subjects[name](counts[name]) / counts[name])
        names.rotate(-1)
    return {
        name: Timing(statistics.median(values), min(values), max(values))
        for name, values in found.items()
    }


def _warm_up(run):
    for _ in range(MOST_WARM_UPS):
        before = memory.peak_resident()
        run(WARM_UP)
        if memory.peak_resident() < 1.01 * before:
            return


def _steps(run, seconds):
    """The number of steps of a subject that take about `seconds`."""
    count = 1
    while (taken := run(count)) < seconds / 10:
        count *= 2
    if count > 1:  # the first steps may have come from a queue, which is empty now
        taken = run(count)
    return max(1, round(count * seconds / taken))
