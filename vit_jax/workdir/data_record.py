"""data.json of a workdir: which images a run began with, by name, size and label.

A run resumes with the same training images, in the same order. So they are compared by a checksum
whenever the run resumes.
"""

import json
import logging
import operator
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax import config as config_lib
from vit_jax.errors import UserError, some
from vit_jax.files import composed, read_json, write_json
from vit_jax.processes import consensus
from vit_jax.workdir import record

log = logging.getLogger(__name__)

DATA = 'data.json'
_LISTED = 10_000  # a split of more images is recorded by class, without the names of images
_SHOWN = 5  # differences that a message lists


def describe(num_images: int, listing: Iterable[tuple[str, str, int]]) -> dict[str, Any]:
    """What data.json says of a split.

    Args:
      num_images: in the split.
      listing: (class, name, size in bytes) of every image, in the order of their indices, see
        data/sources.py.

    Returns `images`, their number; `checksum` of all; `order`, a checksum of their order;
    `classes`, for each class the number of its images and their checksum; `names`, the size of each
    image by its name, of few images only.
    """
    rows = list(listing)
    order = 0
    for _, name, _ in rows:
        order = zlib.crc32(f'{name}\n'.encode(errors='backslashreplace'), order)
    rows.sort(key=operator.itemgetter(1))
    classes: dict[str, tuple[int, int]] = {}
    names: dict[str, int] = {}
    for part, name, size in rows:
        count, checksum = classes.get(part, (0, 0))
        line = f'{name}\0{size}\n'.encode(errors='backslashreplace')
        classes[part] = (count + 1, zlib.crc32(line, checksum))
        if len(names) <= _LISTED:
            names[name] = size
    if len(names) > _LISTED:
        names = {}
    return {
        'images': num_images,
        'checksum': zlib.crc32(json.dumps(sorted(classes.items())).encode()),
        'order': order,
        'classes': {name: list(values) for name, values in sorted(classes.items())},
        'names': names,
    }


def check_equal(data: Mapping[str, Mapping]) -> None:
    """Raises UserError if images of the processes differ in a name, a size or a label."""
    consensus.check_equal(
        'the data',
        {
            f'checksum of names, sizes and labels of the images, {split}': values['checksum']
            for split, values in data.items()
        },
    )


def read(workdir: str) -> dict[str, Any] | None:
    """The record of a run; None for a run of an earlier version, which has none.

    Raises UserError if the file is damaged.
    """
    path = os.path.join(workdir, DATA)
    if not os.path.lexists(path):
        return None
    data = read_json(path, dict)
    for split in ('train', 'eval'):
        if not _is_description(data.get(split)):
            raise UserError(
                f'{path} has {json.dumps(data.get(split)):.80} for {split}, expected what the run '
                'recorded of its images: restore the file. Without it the run resumes, and its '
                'images are not compared.'
            )
    return data


def _is_description(value):
    return (
        isinstance(value, dict)
        and all(type(value.get(name)) is int for name in ('images', 'checksum', 'order'))
        and all(isinstance(value.get(name), dict) for name in ('classes', 'names'))
        and all(_is_pair(pair) for pair in value['classes'].values())
    )


def _is_pair(value):
    return isinstance(value, list) and [type(number) for number in value] == [int, int]


def require_same(
    workdir: str, old: Mapping, config: Mapping, data: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares the images with those with which a run began; all processes decide alike.

    Args:
      old, config: the recorded config of the run, and that with which it resumes. Splits that are
        others are left to record.require_same_run.
      data: from `describe`, for `train` and `eval`.

    Raises UserError if training images differ. Other evaluation images give a warning: they change
    no parameters.
    """
    consensus.from_main(lambda: _require_same(workdir, old['dataset'], config['dataset'], data))


def _require_same(workdir, old, dataset, data):
    recorded = read(workdir)
    if recorded is None:
        return
    changes = {
        split: _changes(recorded[split], data[split])
        for split in ('train', 'eval')
        if _names_same_split(old, dataset, f'{split}_split')
        and recorded[split]['checksum'] != data[split]['checksum']
    }
    if (
        'train' not in changes
        and _names_same_split(old, dataset, 'train_split')
        and recorded['train']['order'] != data['train']['order']
    ):
        changes['train'] = [
            'the images are the same in another order, which depends on all files of the folder '
            'that the split is cut from: files were added there, or removed'
        ]
    if 'train' in changes:
        raise UserError(
            f'the training images of {workdir} are not those with which the run began '
            f'({dataset["train_split"]} of {dataset["name"]}):\n  '
            + '\n  '.join(changes['train'])
            + '\n'
            + record.ways_out_of_other_images(workdir)
        )
    if 'eval' in changes:
        log.warning(
            'the evaluation images are not those with which the run began (%s of %s): numbers of '
            'evaluations from here on, and what is best, are not comparable with those before:\n'
            '  %s',
            dataset['eval_split'],
            dataset['name'],
            '\n  '.join(changes['eval']),
        )


def _names_same_split(old, dataset, field):
    same_fields = all(old.get(name, '') == dataset[name] for name in (field, 'label'))
    old_name = old.get('name', '')
    same_name = old_name == dataset['name']
    return same_fields and (same_name or config_lib.may_have_moved(old_name, dataset['name']))


def _changes(old, new):
    """What differs between two descriptions, one line each."""
    lines = []
    if old['images'] != new['images']:
        lines.append(f'{old["images"]} images then, {new["images"]} now')
    if old['names'] and new['names']:
        lines += _changed_names(old['names'], new['names'])
    else:
        lines += _changed_classes(old['classes'], new['classes'])
    if lines:
        return lines
    return [
        f'checksum {old["checksum"]} then, {new["checksum"]} now, and nothing else: {DATA} in the '
        'workdir may be damaged. Without it the run resumes, and its images are not compared'
    ]


def _changed_classes(old, new):
    """The lines for classes whose images differ."""
    lines = [
        _changed_class(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[:_SHOWN], f'and {len(lines) - _SHOWN} more classes']


def _changed_names(old, new):
    """The lines for images that are new, missing or of another size."""
    if old != new and _by_form(old) == _by_form(new):
        return [
            'names of files or folders differ in Unicode normalisation only (NFC and NFD), on '
            'which the order of images depends: rename them as they were'
        ]
    resized = [name for name in old if name in new and old[name] != new[name]]
    kinds = {
        'new': [name for name in new if name not in old],
        'missing': [name for name in old if name not in new],
        'of another size': [f'{name} ({old[name]} bytes, now {new[name]})' for name in resized],
    }
    return [f'{len(names)} {kind}: {some(names, _SHOWN)}' for kind, names in kinds.items() if names]


def _by_form(sizes):
    return {composed(name): size for name, size in sizes.items()}


def _changed_class(name, old, new):
    before = old[0] if old else 0
    now = new[0] if new else 0
    if before == now:
        return f'{name}: {now} images, names or sizes of which are others'
    return f'{name}: {before} images then, {now} now'


def write(workdir: str, data: Mapping[str, Any]) -> None:
    """Records the images of a run, on process 0 only."""
    if consensus.is_main():
        write_json(os.path.join(workdir, DATA), data)
