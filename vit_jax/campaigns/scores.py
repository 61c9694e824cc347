"""Scores of the runs of a campaign: the last value of config.best_metric in each run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax.workdir import descriptions, metrics


class Ranking(NamedTuple):
    """The metric that ranks the runs of a campaign."""

    name: str  # in metrics.jsonl
    metric: descriptions.Metric

    @property
    def key(self) -> str:
        """The part of keys in JSON files that names the metric: 'accuracy' for eval/accuracy."""
        return self.name.removeprefix('eval/').replace('/', '_')

    def text(self, value: float | None, otherwise: str) -> str:
        """Returns a score as in the log, such as '50.00 %'; `otherwise` if it is None."""
        if value is None:
            return otherwise
        return self.metric.text(value)


ACCURACY = Ranking(metrics.ACCURACY, descriptions.assumed(metrics.ACCURACY))


def ranking(workdir: str, config: Mapping[str, Any]) -> Ranking:
    """Returns the metric config.best_metric, as the workdir of a finished run describes it."""
    name = config['best_metric']
    return Ranking(name, descriptions.of_names(workdir, [name], config)[name])


def last_score(workdir: str, name: str) -> float:
    """Returns the last value of a metric in the workdir of a finished run."""
    values = metrics.scores(metrics.read(workdir), name)
    return values[max(values)]
