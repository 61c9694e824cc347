"""Times several things in turn, so that what else the machine does meets all of them alike."""

import argparse
import collections
import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vit_jax.errors import UserError, check_at_least

# On a CPU the first steps are slow, as each asks the system for memory that it has not given yet.
WARM_UP = 8


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


def in_turn(subjects: Mapping[str, Callable[[int], float]], rounds: int, seconds: float
            ) -> dict[str, Timing]:
    """The time of a step of every subject.

    Args:
      subjects: functions that compute a number of steps and return the seconds that they took. The
        first WARM_UP steps are not counted.
      rounds: in each of them every subject has its turn, another one first each time.
      seconds: about how long a turn takes, at least one step.
    """
    counts, found = {}, {name: [] for name in subjects}
    for name, run in subjects.items():
        run(WARM_UP)
        counts[name] = _steps(run, seconds)
    names = collections.deque(subjects)
    for _ in range(rounds):
        for name in names:
            found[name].append(subjects[name](counts[name]) / counts[name])
        names.rotate(-1)
    return {name: Timing(statistics.median(values), min(values), max(values))
            for name, values in found.items()}


def _steps(run, seconds):
    """The number of steps of a subject that take about `seconds`."""
    count = 1
    while (taken := run(count)) < seconds / 10:
        count *= 2
    if count > 1:  # the first steps may have come from a queue, which is empty now
        taken = run(count)
    return max(1, round(count * seconds / taken))
