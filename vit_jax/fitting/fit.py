"""The stages of a fit, one after another; each is recorded, and a resumed fit skips it."""

import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import weights as weights_lib
from vit_jax.data import grouped_split, photo_table
from vit_jax.data.photo_table import Row
from vit_jax.data.stratify import stratified_order
from vit_jax.errors import UserError, counted
from vit_jax.evaluators import temperature
from vit_jax.files import writing
from vit_jax.fitting import (
    budget,
    calibrated,
    conclusion,
    cross_validation,
    duplicates,
    outcome,
    parts,
    probe,
    scan,
    suspects,
    tries,
)
from vit_jax.fitting.collect import SPLITS, TEST, TRAIN, VALIDATION, Collection, collect
from vit_jax.fitting.extraction import Extractor, logits_of
from vit_jax.fitting.record import IMAGES, MODEL, TABLE, Record
from vit_jax.fitting.tries import Score, Setup
from vit_jax.workdir import lock, log_file, run_directory

log = logging.getLogger(__name__)

FEATURES = 'features.npz'
PROBE = 'probe.safetensors'
SUSPECTS = 'suspects.csv'
LAYOUT = 'vit_jax'
_FIRST_MODEL_AFTER = 40.0  # seconds from the start of the process
_FIRST_STRENGTH = 1e-2  # of the penalty of that model, which no held-out photos choose
_SHARE_OF_FEATURES = 0.3  # of the time, which a large set may take
_FEWEST_FEATURES = 100  # photos that have features at any rate: fewer might all train
_BATCH = 32  # photos whose features are computed together
_RESERVED = 0.1  # of the time, for the scores at the end


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command asks for.

    Attributes:
      data: a directory, a table of photos or a data set.
      pretrained: weights of any layout.
      minutes: how long it may take.
      seed: of the cuts and of all runs.
      folds: of the cross-validation of the linear probe; 0: there is none.
    """

    data: str
    pretrained: str
    minutes: float
    seed: int = 0
    folds: int = 0


@dataclasses.dataclass(frozen=True)
class Data:
    """The photos with their splits, and the frozen features of those that were computed.

    Attributes:
      rows: good photos, each with a split.
      class_names: in the order of their numbers.
      multi_label: whether photos may have several labels.
      targets: [images, classes], whether a photo shows a class.
      features: [images, features], frozen; rows that were not computed are not finite.
      groups: [images], equal for photos that show the same thing.
      balanced: whether classes are so unequal that rare ones are shown more often.
      side: the median of the photos' shorter sides in pixels.
    """

    rows: list[Row]
    class_names: tuple[str, ...]
    multi_label: bool
    targets: np.ndarray
    features: np.ndarray
    groups: np.ndarray
    balanced: bool
    side: int

    def part(self, split: str, with_features: bool = False) -> np.ndarray:
        """The indices of the photos of a split, only those with features if asked."""
        inside = np.array([row.split == split for row in self.rows])
        if with_features:
            inside &= np.isfinite(self.features[:, 0])
        return np.flatnonzero(inside)

    def files(self, indices: np.ndarray) -> list[str]:
        """The paths of photos."""
        return [self.rows[k].file for k in indices.tolist()]


def run(
    settings: Settings, folder: str, recipe: Callable[[str], ConfigDict], started: float
) -> int:
    """Fit a classifier, or resume a fit.

    Args:
      settings: what is asked for.
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
    """Remove what a killed process has begun to write; models may be large."""
    for path in pathlib.Path(folder).glob('*.safetensors.writing-*'):
        path.unlink()


def _run(settings, folder, record, recipe, started):
    end = started + 60 * settings.minutes
    pretrained = weights_lib.load(settings.pretrained)
    data = _prepared(settings, folder, record, pretrained, started)
    if settings.folds:
        _cut_into_folds(data, settings.folds)  # an error comes before training
    probe_score = _probe(folder, record, data, pretrained)
    probed = weights_lib.load(os.path.join(folder, PROBE))
    setup = _setup(settings, folder, data, probed, recipe)
    plan = _plan(record, setup, data, probed, end - time.monotonic())
    code, best = _train_all(folder, record, setup, plan, data, probe_score, end)
    if code:
        return code
    _conclude(folder, record, data, best, settings.folds)
    return 0


def _prepared(settings, folder, record, pretrained, started) -> Data:
    """The photos, scanned, with features and splits."""
    if record.has('scan'):
        _require_unchanged(settings, folder, record)
    else:
        found = collect(settings.data, os.path.join(folder, IMAGES))
        photos, summary = _scanned(settings, found)
        parts.require_enough(photos)
        record.begin()
        features = _features(settings, folder, pretrained, photos, started)
        rows = _cut(settings, record, photos, features)
        photo_table.write(os.path.join(folder, TABLE), rows, photos.multi_label)
        numbers = {'class_names': list(found.class_names), 'checksum': found.checksum()}
        record.write('scan', summary.as_json() | numbers)
    table = photo_table.read(os.path.join(folder, TABLE))
    rows = list(table.rows)
    class_names = tuple(record['scan']['class_names'])
    return Data(
        rows=rows,
        class_names=class_names,
        multi_label=table.multi_label,
        targets=parts.targets_of(rows, class_names),
        features=_read_features(folder),
        groups=np.array([int(row.group) for row in rows]),
        balanced=record['scan']['imbalance'] >= scan.UNEQUAL,
        side=record['scan']['sides'][1],
    )


def _require_unchanged(settings, folder, record):
    """Raise UserError if a resumed fit has other photos or other labels."""
    if not os.path.exists(os.path.expanduser(settings.data)):
        return  # a data set without files, whose images are in the folder of the fit
    found = collect(settings.data, os.path.join(folder, IMAGES))
    if found.checksum() != record['scan']['checksum']:
        raise UserError(
            f'The photos of {settings.data} have changed since the fit in {folder} began: photos '
            'or labels are new, different or gone. To fit them as they are now, choose another '
            '--workdir.',
            kind='conflict',
            field='--workdir',
            file=settings.data,
        )


def _scanned(settings: Settings, found: Collection) -> tuple[Collection, scan.Summary]:
    """The good photos, and what the scan has found."""
    left_out = None
    if os.path.isdir(os.path.expanduser(settings.data)):
        folders = dict.fromkeys(os.path.dirname(row.file) for row in found.rows)
        left_out = scan.other_formats(folders)
    looked_at = scan.scan([row.file for row in found.rows])
    good = [
        row._replace(group=row.group)
        for row, photo in zip(found.rows, looked_at, strict=True)
        if not photo.problem
    ]
    if not good:
        first = looked_at[0]
        raise UserError(
            f'None of the {len(looked_at)} photos can be read; the first is {first.file}: '
            f'{first.problem}. Expected image files, for example JPEG or PNG.',
            kind='content',
            file=first.file,
        )
    labels = {row.file: row.labels for row in found.rows}
    summary = scan.summarise(looked_at, labels, left_out)
    scan.report(summary)
    checksums = {photo.file: photo.checksum for photo in looked_at}
    return found._replace(rows=_with_copies_grouped(good, checksums)), summary


def _with_copies_grouped(rows, checksums):
    """Rows whose `group` is a number: equal files, and photos of one named group, share it."""
    pairs = duplicates.equal_pairs([checksums[row.file] for row in rows])
    pairs += duplicates.pairs_of_names([row.group for row in rows])
    groups = duplicates.groups_of_pairs(len(rows), pairs)
    return [row._replace(group=str(group)) for row, group in zip(rows, groups, strict=True)]


def _features(settings, folder, pretrained, photos, started):
    """The frozen features of the photos; not finite for those that there was no time for.

    After _FIRST_MODEL_AFTER seconds, a first model is made of the features that there are.
    """
    rows = photos.rows
    targets = parts.targets_of(rows, photos.class_names)
    splits = np.array([('', *SPLITS).index(row.split) for row in rows])
    _, strata = np.unique((1 + len(SPLITS)) * targets.argmax(axis=1) + splits, return_inverse=True)
    order = stratified_order(strata)
    fewest = max(_FEWEST_FEATURES, 2 * (strata.max() + 1))
    extract = Extractor(pretrained, min(_BATCH, len(rows)))
    deadline = started + 60 * settings.minutes * _SHARE_OF_FEATURES
    log.info('Computing the features of %s', counted(len(rows), 'photo'))
    features = np.zeros((0, 0), np.float32)
    done = 0
    has_model = os.path.exists(os.path.join(folder, MODEL))
    for batch in extract.batches([rows[k].file for k in order]):
        if not features.size:
            features = np.full((len(rows), batch.shape[1]), np.nan, np.float32)
        features[order[done : done + len(batch)]] = batch
        done += len(batch)
        now = time.monotonic()
        if not has_model and now - started > _FIRST_MODEL_AFTER:
            _first_model(folder, pretrained, photos, features, targets)
            has_model = True
        if now > deadline and fewest <= done < len(rows):
            log.warning(
                'There is time for the features of %d of %d photos: near duplicates and suspects '
                'are found among these alone. More --minutes find more.',
                done,
                len(rows),
            )
            break
    with writing(os.path.join(folder, FEATURES)) as temporary, open(temporary, 'wb') as file:
        np.savez(file, features=features)
    return features


def _read_features(folder):
    with np.load(os.path.join(folder, FEATURES)) as arrays:
        return arrays['features']


def _first_model(folder, pretrained, photos, features, targets):
    known = np.isfinite(features[:, 0])
    head = probe.fit(features[known], targets[known], _FIRST_STRENGTH, photos.multi_label)
    model = probe.with_head(pretrained, head, photos.class_names, photos.multi_label)
    weights_lib.save(model, os.path.join(folder, MODEL), LAYOUT)
    log.info(
        'Wrote a first model, trained on the features of %s: %s',
        counted(known.sum(), 'photo'),
        os.path.join(folder, MODEL),
    )


def _cut(settings, record, photos, features):
    """The rows with splits; near duplicates stay together, or are reported across splits."""
    known = np.flatnonzero(np.isfinite(features[:, 0]))
    found = duplicates.near_pairs(features[known])
    group = [row.group for row in photos.rows]
    pairs = [
        (int(known[i]), int(known[j]), similarity)
        for i, j, similarity in found
        if group[known[i]] != group[known[j]]  # copies are no near duplicates
    ]
    same_group = duplicates.pairs_of_names(group)
    groups = duplicates.groups_of_pairs(
        len(photos.rows), [*same_group, *((i, j) for i, j, _ in pairs)]
    )
    rows = parts.with_splits(photos, groups, settings.seed)
    rows = [row._replace(group=str(group)) for row, group in zip(rows, groups, strict=True)]
    copies = [(i, j, 1.0) for i, j in same_group]
    across = parts.check_groups(rows, [*copies, *pairs])
    record.write('duplicates', {'pairs': len(pairs), 'across_splits': across})
    return rows


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
        weights_lib.save(model, os.path.join(folder, PROBE), LAYOUT)
        weights_lib.save(model, os.path.join(folder, MODEL), LAYOUT)
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


def _setup(settings, folder, data, probed, recipe) -> Setup:
    argument = tries.recipe_argument(probed)
    return Setup(
        recipe=recipe(argument),
        recipe_argument=argument,
        weights=os.path.abspath(os.path.join(folder, PROBE)),
        model=probed.model,
        table=os.path.abspath(os.path.join(folder, TABLE)),
        multi_label=data.multi_label,
        balanced=data.balanced,
        seed=settings.seed,
    )


def _plan(record, setup, data, probed, seconds) -> budget.Plan:
    """What is trained; the plan of a resumed fit stays."""
    if not record.has('plan'):
        num_train = len(data.part(TRAIN))
        batch_size = budget.batch_size_for(num_train, jax.default_backend(), jax.device_count())
        step = budget.Step(probed.image_size(), batch_size)
        changes = tries.fields(setup, step, 100, budget.RATES[0], 10, is_augmented=False)
        changes |= {'dataset.num_examples': num_train, 'pretrained': '', 'transfer.take': ()}
        changes |= {'dataset.num_classes': len(data.class_names), 'transfer.keep_head': False}
        config = _changed(setup.recipe, changes)
        plan = budget.make_plan(
            config, seconds * (1 - _RESERVED), num_train, len(data.part(VALIDATION)), data.side
        )
        record.write('plan', plan.as_json())
    plan = budget.from_json(record['plan'])
    _report_plan(plan, len(data.part(TRAIN)))
    return plan


def _changed(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    from vit_jax import config as config_lib

    return config_lib.changed(config, changes)


def _report_plan(plan, num_train):
    if not plan.run_steps:
        log.info('There is no time for fine-tuning: the linear probe is the model')
        return
    log.info(
        'A step of %d images of %dx%d px takes %.2f s here',
        plan.batch_size,
        *plan.image_size,
        plan.seconds_per_step,
    )
    first = f'uses the learning rate {plan.rates[0]:g} without tries'
    if plan.try_steps:
        first = f'tries {counted(len(plan.rates), "learning rate")} for {plan.try_steps} steps each'
    log.info(
        'Fine-tuning %s, then trains for %d steps (%.1f epochs): about %.0f minutes',
        first,
        plan.run_steps,
        plan.run_steps * plan.batch_size / num_train,
        plan.seconds() / 60,
    )


def _steps_of_run(record, plan, end):
    """Steps of the long run that end in time: the plan's, or fewer if the tries took longer."""
    if not record.has('run_steps'):
        seconds = (1 - _RESERVED) * (end - time.monotonic())
        record.write('run_steps', budget.steps_in(plan, seconds))
    return record['run_steps']


def _train_all(folder, record, setup, plan, data, probe_score, end):
    """Train the tries and the long run.

    Args:
      folder: of the fit.
      record: what is done.
      setup: what all runs have in common.
      plan: what is trained.
      data: the photos.
      probe_score: the score of the linear probe.
      end: time.monotonic() at which the fit should end.

    Returns:
      0 and the path of the best model, or the exit code after a signal and ''.
    """
    candidates = {os.path.join(folder, PROBE): probe_score}
    if not plan.run_steps:
        return 0, os.path.join(folder, PROBE)
    epoch_steps = max(1, len(data.part(TRAIN)) // plan.batch_size)
    scores: dict[str, Any] = {}
    done: set[str] = set()
    chosen = None
    while True:
        remaining = [t for t in tries.plan_of_tries(plan, scores) if t[0] not in done]
        if not remaining:
            break
        name, rate, is_augmented = remaining[0]
        changes = tries.fields(
            setup,
            plan.step(),
            plan.try_steps,
            rate,
            epoch_steps,
            is_augmented,
            tries.EVALUATIONS_OF_A_TRY,
        )
        changes['report'] = False
        workdir = os.path.join(folder, 'tries', name)
        code, score = _trained(record, setup, changes, workdir, f'try {name}')
        if code:
            return code, ''
        done.add(name)
        scores[name] = score
        if score is not None:
            candidates[workdir] = score
            is_better = chosen is None or score.goodness() > chosen[0].goodness()
            chosen = (score, rate, is_augmented) if is_better else chosen
    run_steps = _steps_of_run(record, plan, end)
    if not plan.try_steps:
        chosen = (None, plan.rates[0], False)
    if chosen is not None and run_steps:
        _, rate, is_augmented = chosen
        changes = tries.fields(setup, plan.step(), run_steps, rate, epoch_steps, is_augmented)
        workdir = os.path.join(folder, 'run')
        log.info('The same run by hand:\n  %s', tries.command(setup, changes, workdir))
        code, score = _trained(record, setup, changes, workdir, 'run')
        if code:
            return code, ''
        if score is not None:
            candidates[workdir] = score
    best = max(candidates, key=lambda path: candidates[path].goodness())
    log.info(
        'The best model on %s is %s: %.2f %%', VALIDATION, best, 100 * candidates[best].accuracy
    )
    return 0, best


def _trained(record, setup, changes, workdir, stage):
    """The exit code and the score of a run, which is trained unless it is recorded."""
    if not record.has(stage):
        code, score = tries.train(setup, changes, workdir)
        if code:
            return code, None
        record.write(stage, score)
        if score is not None:
            log.info('%s: %.2f %% on %s', stage, 100 * score.accuracy, VALIDATION)
    score = record[stage]
    return 0, None if score is None else Score(*score)


def _conclude(folder, record, data, best, num_folds):
    """Calibrate the best model, write it, score it, list the suspects, and report all of it."""
    model = weights_lib.load(best)
    extract = Extractor(model, _BATCH)
    held_out, test = data.part(VALIDATION), data.part(TEST)
    logits = logits_of(model, extract(data.files(held_out)))
    targets = data.targets[held_out]
    labels = targets.astype(np.float64) if data.multi_label else targets.argmax(axis=1)
    value = temperature.fit(logits, labels)
    model = calibrated.with_temperature(model, value)
    path = os.path.join(folder, MODEL)
    weights_lib.save(model, path, LAYOUT)
    files = data.files(test)
    found = outcome.score(
        files,
        data.targets[test],
        logits_of(model, extract(files)),
        data.class_names,
        data.multi_label,
        value,
    )
    ranked = _suspects(folder, data, _held_out_probabilities(record, data, num_folds))
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
            probe=os.path.join(folder, PROBE),
            outcome=found,
            suspects=ranked,
        )
    )


def _classifier(data, strength):
    """A function (features, targets, queries) -> probabilities of the queries, by a new probe."""

    def classify(features, targets, queries):
        head = probe.fit(features, targets, strength, data.multi_label, data.balanced)
        return probe.probabilities(head.logits(queries), data.multi_label)

    return classify


def _held_out_probabilities(record, data, num_folds):
    """Probabilities of all photos with features by probes that have not seen them."""
    if num_folds:
        return _cross_validated(record, data, num_folds)
    return _out_of_fold(data)


def _out_of_fold(data):
    """Probabilities of all photos with features by probes that have not seen them."""
    known = np.flatnonzero(np.isfinite(data.features[:, 0]))
    targets = data.targets[known]
    shares = [1 / suspects.FOLDS] * suspects.FOLDS
    folds = grouped_split.cut(targets, data.groups[known], shares)
    classify = _classifier(data, _FIRST_STRENGTH)
    probabilities = np.zeros(data.targets.shape)
    probabilities[known] = suspects.out_of_fold(data.features[known], targets, folds, classify)
    return probabilities


def _cut_into_folds(data, num_folds):
    """The photos of train and val that have features, and the number of the fold of each."""
    inside = np.sort(np.concatenate([data.part(split, True) for split in (TRAIN, VALIDATION)]))
    folds = cross_validation.cut(data.targets[inside], data.groups[inside], num_folds)
    return inside, folds


def _cross_validated(record, data, num_folds):
    """Cross-validate the probe on train and val.

    The penalty is the one that the probe of the fit has chosen. A probe of all of train and val
    predicts the photos of test.

    Returns:
      Probabilities of all photos with features by probes that have not seen them.
    """
    classify = _classifier(data, record['probe']['strength'])
    inside, folds = _cut_into_folds(data, num_folds)
    features = data.features[inside]
    targets = data.targets[inside]
    probabilities = np.zeros(data.targets.shape)
    probabilities[inside] = suspects.out_of_fold(features, targets, folds, classify)
    test = data.part(TEST, True)
    probabilities[test] = classify(features, targets, data.features[test])
    result = cross_validation.score(probabilities[inside], targets, folds, data.multi_label)
    cross_validation.report(result)
    record.write('cross_validation', result._asdict())
    return probabilities


def _suspects(folder, data, probabilities):
    """Rank all photos with features by how doubtful their label is."""
    known = np.flatnonzero(np.isfinite(data.features[:, 0]))
    targets = data.targets[known]
    values = probabilities[known]
    ranked = suspects.ranked(data.files(known), targets, values, data.class_names)
    suspects.write(os.path.join(folder, SUSPECTS), ranked)
    return ranked
