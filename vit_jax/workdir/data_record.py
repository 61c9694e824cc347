"""data.json of a workdir: the images of a run at its start, by name, size and label.

A run must resume with the same training images in the same order, so every resumed run compares
their checksums.
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
_LISTED = 10_000  # a split with more images is recorded without the names of images
_SHOWN = 5  # number of differences in a message


def describe(num_images: int, listing: Iterable[tuple[str, str, int]]) -> dict[str, Any]:
    """Describes a split for data.json.

    Args:
      num_images: number of images in the split.
      listing: (class, name, size in bytes) of every image, in the order of their indices, see
        data/sources.py.

    Returns:
      A dict with the keys
        images: number of images.
        checksum: checksum of the names, sizes and labels.
        order: checksum of the order of the images.
        classes: for each class the number of its images and their checksum.
        names: the size of each image by name; empty for more than 10,000 images.
    """
    rows = list(listing)
    order = 0
    for _, name, _ in rows:
        order = zlib.crc32(f'{name}\n'.encode(errors='backslashreplace'), order)
    rows.sort(key=operator.itemgetter(1))
    classes: dict[str, tuple[int, int]] = {}
    names: dict[str, int] = {}
    for class_name, name, size in rows:
        count, checksum = classes.get(class_name, (0, 0))
        line = f'{name}\0{size}\n'.encode(errors='backslashreplace')
        classes[class_name] = (count + 1, zlib.crc32(line, checksum))
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
    """Raises UserError if the images differ between processes in a name, a size or a label."""
    consensus.check_equal(
        'the data',
        {
            f'checksum of names, sizes and labels of the images, {split}': values['checksum']
            for split, values in data.items()
        },
    )


def read(workdir: str) -> dict[str, Any] | None:
    """Reads data.json; returns None for runs of earlier versions, which have no such file.

    Raises:
      UserError: the file is damaged.
    """
    path = os.path.join(workdir, DATA)
    if not os.path.lexists(path):
        return None
    data = read_json(path, dict)
    for split in ('train', 'eval'):
        if not _is_description(data.get(split)):
            raise UserError(
                f'{path} has {json.dumps(data.get(split)):.80} for {split}: expected the '
                'description of its images. Restore the file. Without the file, the run resumes '
                'and does not compare its images.',
                kind='content',
                file=path,
                field=split,
                value=data.get(split),
            )
    return data


def _is_description(value):
    if not isinstance(value, dict):
        return False
    if any(type(value.get(name)) is not int for name in ('images', 'checksum', 'order')):
        return False
    if any(not isinstance(value.get(name), dict) for name in ('classes', 'names')):
        return False
    return all(_is_pair(pair) for pair in value['classes'].values())


def _is_pair(value):
    if not isinstance(value, list):
        return False
    return [type(number) for number in value] == [int, int]


def require_same(
    workdir: str, old: Mapping, dataset: Mapping, data: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compares the images with the recorded images; the result is equal on all processes.

    A split that the two configs name differently is not compared, because record.require_same_run
    reports the different name. Changed evaluation images log a warning, because they do not affect
    the parameters.

    Args:
      workdir: the directory of the run.
      old: the recorded `config.dataset` of the run.
      dataset: `config.dataset` of the resumed run.
      data: the descriptions of the splits `train` and `eval`, see `describe`.

    Raises:
      UserError: the training images differ.
    """
    consensus.from_main(lambda: _require_same(workdir, old, dataset, data))


def _require_same(workdir, old, dataset, data):
    recorded = read(workdir)
    if recorded is None:
        return
    changes = {}
    for split in ('train', 'eval'):
        if _names_same_split(old, dataset, f'{split}_split'):
            lines = _changes(recorded[split], data[split], compare_order=split == 'train')
            if lines:
                changes[split] = lines
    if 'train' in changes:
        raise UserError(
            f'the training images of {workdir} have changed since the run started '
            f'({dataset["train_split"]} of {dataset["name"]}):\n  '
            + '\n  '.join(changes['train'])
            + '\n'
            + record.advice_on_changed_images(workdir),
            kind='conflict',
            field='dataset.train_split',
            file=workdir,
            value=changes['train'],
        )
    if 'eval' in changes:
        log.warning(
            'the evaluation images have changed since the run started (%s of %s): evaluations and '
            'the best checkpoint are no longer comparable with earlier ones:\n  %s',
            dataset['eval_split'],
            dataset['name'],
            '\n  '.join(changes['eval']),
        )


def _names_same_split(old, dataset, field):
    """Whether two `config.dataset` have the same split and label, and the same (or moved) data."""
    if any(old.get(name, '') != dataset[name] for name in (field, 'label')):
        return False
    old_name = old.get('name', '')
    if old_name == dataset['name']:
        return True
    return config_lib.may_have_moved(old_name, dataset['name'])


def _changes(old, new, compare_order):
    """One line for each difference between two descriptions."""
    if old['checksum'] != new['checksum']:
        return _changed_content(old, new)
    if compare_order and old['order'] != new['order']:
        return [
            'the images are the same in another order, which depends on all files of the folder '
            'that contains the split: files were added or removed there'
        ]
    return []


def _changed_content(old, new):
    """One line for each difference in names, sizes or labels."""
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
        f'only the checksum: {old["checksum"]} then, {new["checksum"]} now. {DATA} in the '
        'workdir may be damaged. Without it, the run resumes and does not compare its images'
    ]


def _changed_classes(old, new):
    """One line for each class whose images differ."""
    lines = [
        _changed_class(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[:_SHOWN], f'and {len(lines) - _SHOWN} more classes']


def _changed_names(old, new):
    """One line each for new images, missing images, and images with another file size."""
    if old != new and _by_composed_name(old) == _by_composed_name(new):
        return [
            'names of files or folders differ only in Unicode normalisation (NFC and NFD). The '
            'order of the images depends on the names: restore the old names'
        ]
    resized = [name for name in old if name in new and old[name] != new[name]]
    kinds = {
        'new': [name for name in new if name not in old],
        'missing': [name for name in old if name not in new],
        'of another size': [f'{name} ({old[name]} bytes, now {new[name]})' for name in resized],
    }
    return [f'{len(names)} {kind}: {some(names, _SHOWN)}' for kind, names in kinds.items() if names]


def _by_composed_name(sizes):
    return {composed(name): size for name, size in sizes.items()}


def _changed_class(name, old, new):
    num_old = old[0] if old else 0
    num_new = new[0] if new else 0
    if num_old == num_new:
        return f'{name}: {num_new} images, with changed names or sizes'
    return f'{name}: {num_old} images then, {num_new} now'


def write(workdir: str, data: Mapping[str, Any]) -> None:
    """Writes data.json, on process 0 only."""
    if consensus.is_main():
        write_json(os.path.join(workdir, DATA), data)
