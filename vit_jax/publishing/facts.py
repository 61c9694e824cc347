"""The records of a run, a fit or an evaluation about the data and the accuracy of a model."""

import collections
import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from vit_jax.data import photo_table
from vit_jax.errors import UserError
from vit_jax.evaluators import classification
from vit_jax.evaluators.metric import MAIN
from vit_jax.files import read_json
from vit_jax.fitting import record as fit_record
from vit_jax.weights import Weights, hub, sidecars
from vit_jax.workdir import data_record, metrics
from vit_jax.workdir import record as run_record

log = logging.getLogger(__name__)

_PRECISION = f'{MAIN}/{classification.MEAN_AVERAGE_PRECISION.name}'
_NUM_EXAMPLES = f'{MAIN}/{classification.NUM_EXAMPLES.name}'
_TEST = 'test'  # the split that a fit scores


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
      name: its name; for files on this machine the last part of the path, because cards are public.
      is_local: whether it is a directory or a table of photos.
      splits: the number of photos of each known split.
    """

    name: str
    is_local: bool
    splits: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a split.

    Attributes:
      data: the data set.
      split: the split that is scored.
      num_images: photos that are scored.
      accuracy: from 0 to 1.
      mean_average_precision: from 0 to 1; None where photos have one label.
      interval: the 95 % confidence interval of the accuracy; None if it is not recorded.
      calibration_error: the expected calibration error; None if it is not recorded.
      classes: (name, accuracy or average precision, number of photos), the worst class first; ()
        if it is not recorded.
      is_held_out: whether the records show that the photos did not train the model.
      chose_model: whether the split also chose the checkpoint.
    """

    data: Data
    split: str
    num_images: int
    accuracy: float
    mean_average_precision: float | None = None
    interval: tuple[float, float] | None = None
    calibration_error: float | None = None
    classes: tuple[tuple[str, float, int], ...] = ()
    is_held_out: bool = True
    chose_model: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """The recorded facts about weights.

    Attributes:
      data: the data that trained them; None if it is not recorded.
      base: the repository on the Hub that training started from; '' if it is not recorded.
      evaluation: None if it is not recorded.
    """

    data: Data | None = None
    base: str = ''
    evaluation: Evaluation | None = None


class _Settings(msgspec.Struct):
    data: str
    pretrained: str


class _Outcome(msgspec.Struct):
    accuracy: float
    num_images: int
    classes: list[tuple[str, float, int, float | None]]  # outcome.ClassScore
    interval: tuple[float, float] | None = None
    mean_average_precision: float | None = None
    calibration_error: float | None = None


class _Fit(msgspec.Struct):
    """fit.json; see fitting/record.py."""

    settings: _Settings
    outcome: _Outcome | None = None


class _Class(msgspec.Struct):
    num_examples: int
    accuracy: float | None = None
    average_precision: float | None = None

    def score(self) -> float | None:
        return self.average_precision if self.accuracy is None else self.accuracy


class _Calibration(msgspec.Struct):
    expected_error: float | None = None


class _Result(msgspec.Struct):
    """The JSON object that vit_jax.evaluate prints; see scoring/classes.py."""

    dataset: str
    split: str
    classes: dict[str, _Class]
    calibration: _Calibration
    accuracy: float = msgspec.field(name=metrics.ACCURACY)
    num_images: float = msgspec.field(name=_NUM_EXAMPLES)
    mean_average_precision: float | None = msgspec.field(name=_PRECISION, default=None)


def read(source: str, loaded: Weights, evaluation: str | None = None) -> Facts:
    """Reads everything that is recorded about weights.

    Args:
      source: the path, address or name that `loaded` was read from: a fit, a run or bare weights.
      loaded: the weights.
      evaluation: a file with the JSON object that vit_jax.evaluate prints; its scores replace the
        recorded ones. None for no file.

    Raises:
      UserError: a record cannot be read, or the evaluation is of a model with other classes.
    """
    fit = _fit_folder(source)
    run = run_record.find(loaded.source)
    if fit:
        facts = _of_fit(fit)
    elif run:
        facts = _of_run(*run, loaded)
    else:
        facts = Facts(base=hub.repository(source))
    if evaluation:
        facts = dataclasses.replace(facts, evaluation=_of_result(evaluation, loaded))
    return facts


def _fit_folder(source):
    """The folder of the fit whose model is the source; '' for other sources."""
    folder = source
    if os.path.basename(source) == fit_record.MODEL:
        folder = os.path.dirname(source) or '.'
    if os.path.isfile(os.path.join(folder, fit_record.FILE)):
        return folder
    return ''


def _of_fit(folder):
    path = os.path.join(folder, fit_record.FILE)
    fit = sidecars.checked(_Fit, read_json(path, dict), path)
    data = _data(fit.settings.data, _splits_of_table(os.path.join(folder, fit_record.TABLE)))
    evaluation = None
    if fit.outcome is None:
        log.warning('%s has no outcome: the fit was stopped before it scored its model', path)
    else:
        evaluation = Evaluation(
            data=data,
            split=_TEST,
            num_images=fit.outcome.num_images,
            accuracy=fit.outcome.accuracy,
            mean_average_precision=fit.outcome.mean_average_precision,
            interval=fit.outcome.interval,
            calibration_error=fit.outcome.calibration_error,
            classes=_worst_first([row[:3] for row in fit.outcome.classes]),
        )
    return Facts(data, hub.repository(fit.settings.pretrained), evaluation)


def _splits_of_table(path):
    """The number of photos of each split; {} without the table."""
    if not os.path.exists(path):
        return {}
    table = photo_table.read(path, require_files=False)
    return dict(collections.Counter(row.split for row in table.rows))


def _of_run(workdir, step, loaded):
    config, _ = run_record.read(workdir)
    dataset = config['dataset']
    data = _data(dataset['name'], _splits_of_run(workdir, dataset))
    base = hub.repository(config.get('pretrained') or '')
    evaluation = None
    if loaded.num_classes:
        evaluation = _evaluation_of_run(workdir, step, config, data)
    return Facts(data, base, evaluation)


def _splits_of_run(workdir, dataset):
    recorded = data_record.read(workdir)
    if recorded is None:  # a run of an earlier version
        return {dataset['train_split']: dataset['num_examples']}
    return {
        dataset[f'{split}_split']: recorded[split]['images']
        for split in ('train', 'eval')
        if dataset.get(f'{split}_split')
    }


def _evaluation_of_run(workdir, step, config, data):
    """The last evaluation of a checkpoint; None, with a warning, if there is none."""
    rows = [
        row
        for row in metrics.read(workdir)
        if row['step'] == step and row.keys() >= {metrics.ACCURACY, _NUM_EXAMPLES}
    ]
    if not rows:
        log.warning(
            '%s has no evaluation of step %s. To add the accuracy to the card, run '
            'vit_jax.evaluate --json and name its result with --evaluation=FILE.',
            workdir,
            step,
        )
        return None
    row = rows[-1]
    dataset = config['dataset']
    return Evaluation(
        data=data,
        split=dataset['eval_split'],
        num_images=int(row[_NUM_EXAMPLES]),
        accuracy=row[metrics.ACCURACY],
        mean_average_precision=row.get(_PRECISION),
        is_held_out=dataset['eval_split'] != dataset['train_split'],
        chose_model=bool(config.get('keep_best')),
    )


def _of_result(path, loaded):
    raw = sidecars.read(path)
    if 'results' in raw:
        raise UserError(
            f'--evaluation={path} has several results: expected one. Score one split with '
            'vit_jax.evaluate --json.',
            kind='content',
            field='--evaluation',
            file=path,
        )
    result = sidecars.checked(_Result, raw, path)
    if len(result.classes) != loaded.num_classes:
        raise UserError(
            f'--evaluation={path} has {len(result.classes)} classes: expected '
            f'{loaded.num_classes}, as {loaded.source} has. Score these weights with '
            'vit_jax.evaluate --json.',
            kind='conflict',
            field='--evaluation',
            file=path,
            value=len(result.classes),
        )
    scored = []
    for name, row in result.classes.items():
        score = row.score()
        if score is not None:
            scored.append((name, score, row.num_examples))
    return Evaluation(
        data=_data(result.dataset, {}),
        split=result.split,
        num_images=int(result.num_images),
        accuracy=result.accuracy,
        mean_average_precision=result.mean_average_precision,
        calibration_error=result.calibration.expected_error,
        classes=_worst_first(scored),
        is_held_out=False,
    )


def _worst_first(classes) -> tuple[tuple[str, float, int], ...]:
    return tuple(sorted(classes, key=lambda row: row[1]))


def _data(name: str, splits: Mapping[str, Any]) -> Data:
    path = os.path.expanduser(name)
    is_table = photo_table.is_table(name)
    is_local = is_table or os.path.isabs(path) or os.path.isdir(path)
    if is_local:
        name = os.path.basename(os.path.normpath(path))
    if is_table:
        name = os.path.splitext(name)[0]
    return Data(name, is_local, splits)
