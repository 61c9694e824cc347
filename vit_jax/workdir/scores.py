"""The scores of a run, which select its best checkpoint."""

import dataclasses
from collections.abc import Iterable, Mapping

from vit_jax.evaluators.metric import Metric
from vit_jax.workdir import descriptions, metrics


@dataclasses.dataclass(frozen=True)
class Scores:
    """The values of one metric in all evaluations of a run.

    Attributes:
      metric: name of the metric, for example eval/accuracy.
      values: the values by step.
      described: the description of the metric; None: the name implies it.
    """

    metric: str = metrics.ACCURACY
    values: Mapping[int, float] = dataclasses.field(default_factory=dict)
    described: Metric | None = None

    @property
    def meaning(self) -> Metric:
        """The description of the metric, with its unit and its best value."""
        return self.described or descriptions.assumed(self.metric)

    def adding(self, step: int, value: float) -> 'Scores':
        """Returns new scores that include the value of another evaluation."""
        return dataclasses.replace(self, values={**self.values, step: value})

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The step with the best score, or None. Ties go to the newest step."""
        return metrics.best(self.values, steps, self.meaning)

    def best(self) -> int | None:
        """The step with the best score of all steps, or None."""
        return self.best_of(self.values)

    def since_best(self) -> int:
        """Number of scores, in the order of steps, that follow the first best score."""
        return metrics.since_best(self.values, self.meaning)


def of_rows(
    rows: Iterable[Mapping[str, float]], metric: str, described: Metric | None = None
) -> Scores:
    """The scores in rows of metrics.jsonl.

    Args:
      rows: the rows.
      metric: name of the metric, for example eval/accuracy.
      described: the description of the metric; None: the name implies it.
    """
    return Scores(metric, metrics.scores(rows, metric), described)
