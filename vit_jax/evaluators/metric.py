"""What a number of an evaluation is: its unit, which way is better, and where it is drawn.

A metric is stated once, beside the code that computes it. The log, the live line, curves.png, the
report, best_metric, patience and `evaluate` read its description here.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.errors import check_choice

MAIN = 'eval'  # the name of the main evaluator, whose metrics are eval/NAME
FEWSHOT = 'fewshot'  # the name of the evaluator of the section evals.fewshot
UNITS = ('percent', 'number', 'count')
DIRECTIONS = ('highest', 'lowest')


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number of an evaluation.

    Attributes:
      name: in metrics.jsonl, behind the name of the evaluator, as in eval/accuracy.
      unit: 'percent' of a share in [0, 1], 'number', or 'count'.
      best: 'highest' or 'lowest', which a checkpoint may be the best by; None: neither is better.
      panel: the title of the curves that it is drawn among, such as 'accuracy' or 'loss'; '': it
        is neither drawn nor said in the log, and stands in metrics.jsonl alone.
      words: its name in a line of the log; '': `name` with spaces.
      legend: its name in a chart of the report; '': `words`.
      title: its name on a card of the report; '': `legend` with a capital.
      least_classes: it says little of fewer classes, and is left out everywhere but in
        metrics.jsonl.
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
        """Raises UserError for a unit or a direction that there is not."""
        check_choice(f'the unit of the metric {self.name}', self.unit, UNITS)
        if self.best is not None:
            check_choice(f'what is best of the metric {self.name}', self.best, DIRECTIONS)
        words = self.words or self.name.replace('_', ' ')
        legend = self.legend or words
        object.__setattr__(self, 'words', words)
        object.__setattr__(self, 'legend', legend)
        object.__setattr__(self, 'title', self.title or legend[:1].upper() + legend[1:])

    def text(self, value: float) -> str:
        """A value as the log has it: '98.61 %', '0.4321' or '360'."""
        if self.unit == 'percent':
            return f'{100 * value:.2f} %'
        if self.unit == 'count':
            return f'{value:,.0f}'
        return f'{value:.4f}'

    def goodness(self, value: float) -> float:
        """The better the higher; what is not a number is worst."""
        if math.isnan(value):
            return -math.inf
        return -value if self.best == 'lowest' else value

    def is_shown(self, num_classes: int) -> bool:
        """Whether it is drawn and said for a model of so many classes."""
        return bool(self.panel) and num_classes >= self.least_classes


def described(evaluator: str, metrics: Iterable[Metric]) -> dict[str, Metric]:
    """The metrics of an evaluator by their names in metrics.jsonl, EVALUATOR/NAME.

    In legends and titles the name of the evaluator stands in front, but not of those that every
    config has.
    """
    found = {}
    for metric in metrics:
        if evaluator not in (MAIN, FEWSHOT):
            metric = dataclasses.replace(
                metric,
                legend=f'{evaluator}: {metric.legend}',
                title=f'{evaluator}: {metric.title}',
            )
        found[f'{evaluator}/{metric.name}'] = metric
    return found


def as_json(metric: Metric) -> dict[str, Any]:
    """The fields of a metric."""
    return dataclasses.asdict(metric)


def from_json(fields: Mapping[str, Any]) -> Metric:
    """The metric of what `as_json` has returned; fields of other versions are left out.

    Raises ValueError if these are no fields of a metric.
    """
    kinds: dict[str, type | tuple[type, ...]] = {'best': (str, type(None)), 'least_classes': int}
    known: dict[str, Any] = {}  # each of the kind of its field
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
