"""The stages of a fit, one after another; each is recorded, and a resumed fit skips it."""

import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Callable

import numpy as np
from ml_collections import ConfigDict

from vit_jax import weights as weights_lib
from vit_jax.errors import UserError
from vit_jax.evaluators import temperature
from vit_jax.fitting import (
    calibrated,
    conclusion,
    cross_validation,
    held_out,
    outcome,
    preparation,
    probe,
    suspects,
    training,
)
from vit_jax.fitting.collect import TEST, TRAIN, VALIDATION
from vit_jax.fitting.extraction import BATCH, Extractor, logits_of
from vit_jax.fitting.record import MODEL, Record, Settings
from vit_jax.fitting.tries import Score
from vit_jax.workdir import lock, log_file, run_directory

log = logging.getLogger(__name__)

SUSPECTS = 'suspects.csv'


def run(
    settings: Settings, folder: str, recipe: Callable[[str], ConfigDict], started: float
) -> int:
    """Fit a classifier, or resume a fit.

    Args:
      settings: the settings of the command.
      folder: for everything that is written.
      recipe: gives the config of tries.RECIPE for an argument.
      started: time.monotonic() at the start of the process.

    Returns:
      0, or the exit code after a signal.

    Raises:
      UserError: if the data, the weights or the folder cannot be used.
    """
    cross_validation.check_count(settings.folds)
    _require_apart(settings.data, folder)
    record = Record(folder, dataclasses.asdict(settings))
    with run_directory.removed_if_refused(folder), lock.reserve(folder):
        log_file.log_to(folder)
        _remove_unfinished(folder)
        return _run(settings, folder, record, recipe, started)


def _require_apart(data, folder):
    """Raise UserError if the folder of the fit is among the photos, where it looks like a class."""
    photos = os.path.realpath(os.path.expanduser(data))
    if not os.path.isdir(photos):
        return
    if pathlib.Path(os.path.realpath(folder)).is_relative_to(photos):
        raise UserError(
            f'--workdir {folder} is in the folder of the photos, {photos}, whose folders are '
            'classes: choose another --workdir.',
            kind='conflict',
            field='--workdir',
            file=photos,
        )


def _remove_unfinished(folder):
    """Remove unfinished files of a killed process; models may be large."""
    for path in pathlib.Path(folder).glob('*.safetensors.writing-*'):
        path.unlink()


def _run(settings, folder, record, recipe, started):
    end = started + 60 * settings.minutes
    pretrained = weights_lib.load(settings.pretrained)
    data = preparation.prepare(settings, folder, record, pretrained, started)
    if settings.folds:
        held_out.cut_into_folds(data, settings.folds)  # an error comes before training
    probe_score = _probe(folder, record, data, pretrained)
    probed = weights_lib.load(os.path.join(folder, probe.FILE))
    setup = training.make_setup(settings, folder, data, probed, recipe)
    plan = training.make_plan(record, setup, data, probed, end - time.monotonic())
    code, best = training.train(folder, record, setup, plan, data, probe_score, end)
    if code:
        return code
    _conclude(folder, record, data, best, settings.folds)
    return 0


def _probe(folder, record, data, pretrained) -> Score:
    """The linear probe: written as a model, and scored on the validation split."""
    if not record.has('probe'):
        started = time.monotonic()
        train, held_out = (data.part(split, True) for split in (TRAIN, VALIDATION))
        head, strength = probe.choose(
            (data.features[train], data.targets[train]),
            (data.features[held_out], data.targets[held_out]),
            data.multi_label,
            data.balanced,
        )
        model = probe.with_head(pretrained, head, data.class_names, data.multi_label)
        weights_lib.save(model, os.path.join(folder, probe.FILE), probe.LAYOUT)
        weights_lib.save(model, os.path.join(folder, MODEL), probe.LAYOUT)
        logits = head.logits(data.features[held_out])
        score = score_of_logits(logits, data.targets[held_out], data.multi_label)
        log.info(
            'A linear probe of the frozen features has %.2f %% on %s: %s',
            100 * score.accuracy,
            VALIDATION,
            os.path.join(folder, MODEL),
        )
        seconds = time.monotonic() - started
        record.write('probe', {'score': score, 'strength': strength, 'seconds': seconds})
    return Score(*record['probe']['score'])


def score_of_logits(logits: np.ndarray, targets: np.ndarray, multi_label: bool) -> Score:
    """The score of logits [images, classes] on photos with these targets."""
    labels = targets.astype(np.float64) if multi_label else targets.argmax(axis=1)
    accuracy = probe.accuracy(logits, targets, multi_label)
    return Score(accuracy, temperature.cross_entropy(logits, labels))


def _conclude(folder, record, data, best, num_folds):
    """Calibrate the best model, write it, score it, list the suspects, and report all of it."""
    model = weights_lib.load(best)
    extract = Extractor(model, BATCH)
    validation = data.part(VALIDATION)
    test = data.part(TEST)
    logits = logits_of(model, extract(data.files(validation)))
    targets = data.targets[validation]
    labels = targets.astype(np.float64) if data.multi_label else targets.argmax(axis=1)
    value = temperature.fit(logits, labels)
    model = calibrated.with_temperature(model, value)
    path = os.path.join(folder, MODEL)
    weights_lib.save(model, path, probe.LAYOUT)
    files = data.files(test)
    found = outcome.score(
        files,
        data.targets[test],
        logits_of(model, extract(files)),
        data.class_names,
        data.multi_label,
        value,
    )
    ranked = _suspects(folder, data, held_out.probabilities(record, data, num_folds))
    outcome.write_tables(found, data.class_names, folder)
    record.write('outcome', found.as_json() | {'model': best})
    conclusion.conclude(
        conclusion.Fit(
            folder=folder,
            entries=record.entries,
            rows=data.rows,
            class_names=data.class_names,
            model=path,
            best=best,
            probe=os.path.join(folder, probe.FILE),
            outcome=found,
            suspects=ranked,
        )
    )


def _suspects(folder, data, probabilities):
    """Rank all photos with features by how doubtful their label is."""
    known = np.flatnonzero(np.isfinite(data.features[:, 0]))
    targets = data.targets[known]
    values = probabilities[known]
    ranked = suspects.ranked(data.files(known), targets, values, data.class_names)
    suspects.write(os.path.join(folder, SUSPECTS), ranked)
    return ranked
