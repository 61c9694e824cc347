"""The first stage of a fit: from photos to rows with splits, and their frozen features.

After forty seconds there is a first model, however many photos there are.
"""

import dataclasses
import logging
import os
import time

import numpy as np

from vit_jax import weights as weights_lib
from vit_jax.data import photo_table
from vit_jax.data.photo_table import Row
from vit_jax.data.stratify import stratified_order
from vit_jax.errors import UserError, counted
from vit_jax.files import writing
from vit_jax.fitting import duplicates, parts, probe, scan
from vit_jax.fitting.collect import SPLITS, Collection, collect
from vit_jax.fitting.extraction import BATCH, Extractor
from vit_jax.fitting.record import IMAGES, MODEL, TABLE, Record, Settings
from vit_jax.weights import Weights

log = logging.getLogger(__name__)

FEATURES = 'features.npz'
_FIRST_MODEL_AFTER = 40.0  # seconds from the start of the process
_SHARE_OF_FEATURES = 0.3  # of the time, which a large set may take
_FEWEST_FEATURES = 100  # photos that have features at any rate: fewer might all train


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


def prepare(
    settings: Settings, folder: str, record: Record, pretrained: Weights, started: float
) -> Data:
    """Scan the photos, compute features, and cut splits; a resumed fit reads all of it.

    Args:
      settings: the settings of the command.
      folder: of the fit.
      record: the finished stages.
      pretrained: the weights that compute the features.
      started: time.monotonic() at the start of the process.

    Raises:
      UserError: if the photos cannot be used, or have changed since the fit began.
    """
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
    """The good photos, and the results of the scan."""
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
    extract = Extractor(pretrained, min(BATCH, len(rows)))
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
    head = probe.fit(features[known], targets[known], probe.STRENGTH, photos.multi_label)
    model = probe.with_head(pretrained, head, photos.class_names, photos.multi_label)
    weights_lib.save(model, os.path.join(folder, MODEL), probe.LAYOUT)
    log.info(
        'Wrote a first model, trained on the features of %s: %s',
        counted(known.sum(), 'photo'),
        os.path.join(folder, MODEL),
    )


def _cut(settings, record, photos, features):
    """The rows with splits; near duplicates stay together, or are reported across splits."""
    known = np.flatnonzero(np.isfinite(features[:, 0]))
    targets = parts.targets_of(photos.rows, photos.class_names)
    found = duplicates.near_pairs(features[known], targets[known])
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
