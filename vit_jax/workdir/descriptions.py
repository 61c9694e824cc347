"""What the numbers in metrics.jsonl are, for those who read a workdir: metrics.json beside it."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.evaluators import classification
from vit_jax.evaluators.metric import FEWSHOT, MAIN, Metric, as_json, described, from_json
from vit_jax.files import read_json, write_json
from vit_jax.processes import consensus

log = logging.getLogger(__name__)

FILE = 'metrics.json'
SECONDS = 'eval/seconds'  # that the evaluations of a row have taken
# Of runs of earlier versions that predict hidden patches, whose hits have the names of accuracies.
PATCHES_OF_EARLIER_RUNS = (
    Metric('accuracy', 'percent', 'highest', 'right colours', 'right colours', 'top-1'),
    Metric('accuracy_top5', 'percent', 'highest', 'right colours', 'top-5', least_classes=10),
    Metric('loss', 'number', 'lowest', 'loss', legend='evaluation', title='Evaluation loss'),
    Metric('num_examples', 'count'),
)
_SHOTS = r'fewshot/(\d+)shot(?:_deviation)?'


def assumed(name: str, predicts_patches: bool = False) -> Metric:
    """The metric of a name in metrics.jsonl of a workdir that does not describe it.

    Args:
      name: as in eval/accuracy. Names that no version had are numbers of which none is better.
      predicts_patches: whether the run predicts hidden patches.
    """
    shots = re.fullmatch(_SHOTS, name)
    if shots:
        from vit_jax.evaluators import fewshot  # imports optimizers, which few readers need

        known = described(FEWSHOT, fewshot.metrics_of([int(shots[1])]))
    elif predicts_patches:
        known = described(MAIN, PATCHES_OF_EARLIER_RUNS)
    else:
        known = described(MAIN, classification.METRICS)
    return known.get(name, Metric(name.partition('/')[2] or name))


def write(workdir: str, metrics: Mapping[str, Metric]) -> None:
    """Writes the descriptions, beside those that the file has of others, on process 0 only."""
    if not consensus.is_main():
        return
    earlier = read(workdir)
    merged = earlier | dict(metrics)
    if merged != earlier:
        content = {name: as_json(metric) for name, metric in merged.items()}
        write_json(os.path.join(workdir, FILE), content)


def read(workdir: str) -> dict[str, Metric]:
    """The descriptions that a workdir has; {} of an earlier version.

    Where the file is damaged, a warning says so: a run that continues writes it again.
    """
    path = os.path.join(workdir, FILE)
    if not os.path.lexists(path):
        return {}
    try:
        content = read_json(path, dict)
        return {name: from_json(fields) for name, fields in content.items()}
    except (UserError, ValueError, TypeError, AttributeError) as error:
        log.warning('%s does not describe metrics (%s): the usual meanings are taken', path, error)
        return {}


def of_names(workdir: str, names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics of some names in metrics.jsonl of a run with that recorded config.

    They are in the order of metrics.json, in which the first metric of an evaluator tells most.
    """
    described = read(workdir)
    names = list(names)
    predicts_patches = config.get('masked', {}).get('target', 'none') != 'none'
    found = {name: metric for name, metric in described.items() if name in names}
    for name in names:
        if name not in found:
            found[name] = assumed(name, predicts_patches)
    return found


def headline(metrics: Mapping[str, Metric]) -> str | None:
    """The name of the metric that tells in a word how good the model is; None if none does."""
    for name, metric in metrics.items():
        if name.startswith(f'{MAIN}/') and metric.panel and metric.best:
            return name
    return None


def names_in(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The names of numbers of evaluations in rows of metrics.jsonl, in the order of their rows."""
    return [name for name in dict.fromkeys(name for row in rows for name in row) if is_scored(name)]


def is_scored(name: str) -> bool:
    """Whether a name in metrics.jsonl is that of a metric of an evaluator."""
    return '/' in name and not name.startswith('train/') and name != SECONDS
