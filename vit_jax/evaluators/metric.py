"""The description of a metric: its unit, the better direction, and the curves that show it.

Each metric is described once, next to the code that computes it. The log, the live line,
curves.png, the report, best_metric, patience and `evaluate` read this description.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.errors import check_choice

MAIN = 'eval'  # name of the main evaluator: its metrics are eval/NAME
FEWSHOT = 'fewshot'  # name of the evaluator of the section evals.fewshot
UNITS = ('percent', 'number', 'count')
DIRECTIONS = ('highest', 'lowest')


@dataclasses.dataclass(frozen=True)
class Metric:
    """The description of a number of an evaluation.

    Attributes:
      name: its name in metrics.jsonl, after the name of the evaluator, as in eval/accuracy.
      unit: 'percent' (for a share in [0, 1]), 'number' or 'count'.
      best: 'highest' or 'lowest', the better direction; None if no direction is better.
      panel: the title of the curves that show it, such as 'accuracy' or 'loss'; '' for metrics that
        only metrics.jsonl contains.
      words: its name in a line of the log; '' for `name` with spaces.
      legend: its name in a chart of the report; '' for `words`.
      title: its name on a card of the report; '' for `legend` with a capital.
      least_classes: with fewer classes than this, only metrics.jsonl contains the metric.
    """

    name: str
    unit: str = 'number'
    best: str | None = None
    panel: str = ''
    words: str = ''
    legend: str = ''
    title: str = ''
    least_classes: int = 0

    def __post_init__(self):
        """Fills in empty names; raises UserError for an unknown unit or direction."""
        check_choice(f'the unit of the metric {self.name}', self.unit, UNITS)
        if self.best is not None:
            check_choice(f'the best of the metric {self.name}', self.best, DIRECTIONS)
        words = self.words or self.name.replace('_', ' ')
        legend = self.legend or words
        object.__setattr__(self, 'words', words)
        object.__setattr__(self, 'legend', legend)
        object.__setattr__(self, 'title', self.title or legend[:1].upper() + legend[1:])

    def text(self, value: float) -> str:
        """A value in the format of the log: '98.61 %', '0.4321' or '360'."""
        if self.unit == 'percent':
            return f'{100 * value:.2f} %'
        if self.unit == 'count':
            return f'{value:,.0f}'
        return f'{value:.4f}'

    def goodness(self, value: float) -> float:
        """A number that is higher for better values; NaN is the worst value."""
        if math.isnan(value):
            return -math.inf
        return -value if self.best == 'lowest' else value

    def is_shown(self, num_classes: int) -> bool:
        """Whether curves and log show the metric for a model with this number of classes."""
        return bool(self.panel) and num_classes >= self.least_classes


def described(evaluator: str, metrics: Iterable[Metric]) -> dict[str, Metric]:
    """The metrics of an evaluator by their names in metrics.jsonl, EVALUATOR/NAME.

    Legends and titles start with the name of the evaluator, except for the main evaluator and
    few-shot accuracy.
    """
    by_name = {}
    for metric in metrics:
        if evaluator not in (MAIN, FEWSHOT):
            metric = dataclasses.replace(
                metric,
                legend=f'{evaluator}: {metric.legend}',
                title=f'{evaluator}: {metric.title}',
            )
        by_name[f'{evaluator}/{metric.name}'] = metric
    return by_name


def as_json(metric: Metric) -> dict[str, Any]:
    """The fields of a metric as a JSON object."""
    return dataclasses.asdict(metric)


def from_json(fields: Mapping[str, Any]) -> Metric:
    """The metric with the fields from `as_json`; fields of other versions are ignored.

    Raises:
      ValueError: if the fields do not describe a metric.
    """
    kinds: dict[str, type | tuple[type, ...]] = {'best': (str, type(None)), 'least_classes': int}
    known: dict[str, Any] = {}
    for field in dataclasses.fields(Metric):
        if field.name not in fields:
            continue
        value = fields[field.name]
        if not isinstance(value, kinds.get(field.name, str)):
            raise ValueError(f'{field.name} is {value!r}')
        known[field.name] = value
    if 'name' not in known:
        raise ValueError('a metric has no name')
    return Metric(**known)
