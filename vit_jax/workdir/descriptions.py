"""metrics.json of a workdir: the descriptions of the metrics in metrics.jsonl."""

import itertools
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
SECONDS = 'eval/seconds'  # duration of the evaluations in a row
# For masked-patch runs of earlier versions, which call the share of right colours an accuracy.
PATCHES_OF_EARLIER_RUNS = (
    Metric('accuracy', 'percent', 'highest', 'right colours', 'right colours', 'top-1'),
    Metric('accuracy_top5', 'percent', 'highest', 'right colours', 'top-5', least_classes=10),
    Metric('loss', 'number', 'lowest', 'loss', legend='evaluation', title='Evaluation loss'),
    Metric('num_examples', 'count'),
)
_SHOTS = r'fewshot/(\d+)shot(?:_deviation)?'


def assumed(name: str, predicts_patches: bool = False) -> Metric:
    """The assumed metric for a name in metrics.jsonl that the workdir does not describe.

    An unknown name is a number without a best value.

    Args:
      name: the name, for example eval/accuracy.
      predicts_patches: whether the run predicts masked patches.
    """
    shots = re.fullmatch(_SHOTS, name)
    if shots:
        from vit_jax.evaluators import fewshot  # it imports optimizers, which few callers need

        known = described(FEWSHOT, fewshot.metrics_of([int(shots[1])]))
    elif predicts_patches:
        known = described(MAIN, PATCHES_OF_EARLIER_RUNS)
    else:
        known = described(MAIN, classification.METRICS)
    return known.get(name, Metric(name.partition('/')[2] or name))


def write(workdir: str, metrics: Mapping[str, Metric]) -> None:
    """Adds descriptions to metrics.json, on process 0 only; its other descriptions stay."""
    if not consensus.is_main():
        return
    earlier = read(workdir)
    merged = earlier | dict(metrics)
    if merged != earlier:
        content = {name: as_json(metric) for name, metric in merged.items()}
        write_json(os.path.join(workdir, FILE), content)


def read(workdir: str) -> dict[str, Metric]:
    """Reads metrics.json; returns {} for runs of earlier versions.

    Logs a warning if the file is damaged: a resumed run writes it again.
    """
    path = os.path.join(workdir, FILE)
    if not os.path.lexists(path):
        return {}
    try:
        content = read_json(path, dict)
        return {name: from_json(fields) for name, fields in content.items()}
    except (UserError, ValueError, TypeError, AttributeError) as error:
        log.warning('%s does not describe metrics (%s): using the usual meanings', path, error)
        return {}


def of_names(workdir: str, names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Metric]:
    """The metrics of some names in metrics.jsonl of a run.

    They are in the order of metrics.json. The first metric of an evaluator is its main one.

    Args:
      workdir: the directory of the run.
      names: the names, for example eval/accuracy.
      config: the recorded config of the run.
    """
    described_in_workdir = read(workdir)
    names = list(names)
    predicts_patches = config.get('masked', {}).get('target', 'none') != 'none'
    metrics = {name: metric for name, metric in described_in_workdir.items() if name in names}
    for name in names:
        if name not in metrics:
            metrics[name] = assumed(name, predicts_patches)
    return metrics


def headline(metrics: Mapping[str, Metric]) -> str | None:
    """The name of the main evaluator's first metric with a panel and a best value, or None."""
    for name, metric in metrics.items():
        if name.startswith(f'{MAIN}/') and metric.panel and metric.best:
            return name
    return None


def names_in(rows: Iterable[Mapping[str, float]]) -> list[str]:
    """The names of evaluation metrics in rows of metrics.jsonl, in the order of the rows."""
    names = []
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        if is_scored(name):
            names.append(name)
    return names


def is_scored(name: str) -> bool:
    """Whether a name in metrics.jsonl is a metric of an evaluator."""
    if name == SECONDS or name.startswith('train/'):
        return False
    return '/' in name
