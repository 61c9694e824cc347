"""The scores of a run: which of its checkpoints is the best, and since when none was better."""

import dataclasses
from collections.abc import Iterable, Mapping

from vit_jax.evaluators.metric import Metric
from vit_jax.workdir import descriptions, metrics


@dataclasses.dataclass(frozen=True)
class Scores:
    """The values of `metric` by step, of all evaluations of a run.

    `described` says which of them are best; None: as the name implies.
    """

    metric: str = metrics.ACCURACY
    values: Mapping[int, float] = dataclasses.field(default_factory=dict)
    described: Metric | None = None

    @property
    def meaning(self) -> Metric:
        """What the values are, and which of them are best."""
        return self.described or descriptions.assumed(self.metric)

    def adding(self, step: int, value: float) -> 'Scores':
        """These scores and that of one more evaluation."""
        return dataclasses.replace(self, values={**self.values, step: value})

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The best of the steps, the newest of equal ones; None if none has a score."""
        return metrics.best(self.values, steps, self.meaning)

    def best(self) -> int | None:
        """The best of all steps that have a score."""
        return self.best_of(self.values)

    def since_best(self) -> int:
        """How many scores, in the order of steps, follow the first of the best."""
        return metrics.since_best(self.values, self.meaning)


def of_rows(
    rows: Iterable[Mapping[str, float]], metric: str, described: Metric | None = None
) -> Scores:
    """The scores in the rows of metrics.jsonl.

    Args:
      metric: as in eval/accuracy.
      described: says which values are best; None: as the name implies.
    """
    return Scores(metric, metrics.scores(rows, metric), described)
