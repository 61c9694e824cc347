"""The config and class names of the run in a workdir, and whether another run may use it."""

import json
import logging
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.files import composed, read_json, write_json
from vit_jax.processes import consensus

log = logging.getLogger(__name__)

CONFIG = 'config.json'
CLASSES = 'classes.json'
CHECKPOINTS = 'checkpoints'  # one folder for each saved step
RECIPE = 'recipe.json'  # the path of the config file, and its fields before --config.FIELD options
OF_SEVERAL = ('sweep.json', 'vtab.json')  # files in a directory of several runs
# Beginnings of the reported differences that changed images cause.
OF_DATA = ('classes:', 'dataset.num_examples:', 'dataset.num_classes:')
# Fields that all versions have written.
NEEDED = {
    'accum_steps',
    'dataset',
    'image_size',
    'loss',
    'model',
    'num_epochs',
    'num_steps',
    'preprocess',
}


def find(path: str) -> tuple[str, int | None] | None:
    """Finds the workdir of a path.

    Returns:
      (workdir, None) if the path is a workdir, (workdir, step) if it is a checkpoint of a workdir,
      otherwise None.
    """
    if os.path.isdir(checkpoint_directory(path)):
        return path, None
    folder, step = os.path.split(os.path.abspath(path))
    is_checkpoint = is_step(step) and os.path.basename(folder) == CHECKPOINTS
    if is_checkpoint and os.path.isdir(path):
        return os.path.dirname(folder), int(step)
    return None


def is_step(name: str) -> bool:
    """Whether a folder name is a step, such as '48', but not '²' or '048'."""
    if not (name.isascii() and name.isdecimal()):
        return False
    return name == '0' or name[0] != '0'


def checkpoint_directory(workdir: str) -> str:
    """The directory of the checkpoints of a run, as the absolute path that Orbax requires."""
    return os.path.join(os.path.abspath(workdir), CHECKPOINTS)


def read(workdir: str) -> tuple[dict[str, Any], list[str]]:
    """Reads the config and the class names of a run.

    Raises:
      UserError: one of the two files cannot be read.
    """
    config = _read_config(os.path.join(workdir, CONFIG))
    classes = _read_classes(os.path.join(workdir, CLASSES))
    return config_lib.with_unrecorded(config), classes


def _read_config(path):
    config = read_json(path, dict)
    expected = config_lib.base().to_dict()
    for field in NEEDED | (config.keys() & expected.keys()):
        value = config.get(field)
        is_section = isinstance(expected[field], dict)
        if isinstance(value, dict) != is_section or field not in config:
            raise UserError(
                f'{path} has {json.dumps(value):.80} for {field}: expected '
                f'{"an object" if is_section else "a value"}. Restore the file.',
                kind='content',
                file=path,
                field=field,
                value=value,
            )
    config_lib.check_recorded(config, path)
    return config


def _read_classes(path):
    classes = read_json(path, list)
    for name in classes:
        if not isinstance(name, str):
            raise UserError(
                f'{path} contains {json.dumps(name):.80}: expected the names of the '
                'classes. Restore the file.',
                kind='content',
                file=path,
                value=name,
            )
    return classes


def saved_steps(directory: str) -> list[int]:
    """The steps of the complete checkpoints in a directory; [] if it does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f'{directory} cannot be read ({error.strerror}): expected the directory of the '
            'checkpoints. Move it away, or use another --workdir.',
            kind='unreadable',
            file=directory,
        ) from error
    return [int(name) for name in names if is_step(name)]


def begun(workdir: str) -> tuple[dict[str, Any], list[str]] | None:
    """The config and the class names of the run in a workdir, the same on all processes.

    Returns:
      (config, class names), or None if no checkpoint is saved: any run may use such a workdir.

    Raises:
      UserError: the workdir contains files of another program or command, which a run would
        replace.
    """

    def read_if_begun():
        if saved_steps(checkpoint_directory(workdir)):
            return read(workdir)
        _require_free(workdir)
        return None

    return consensus.from_main(read_if_begun)


def _require_free(workdir):
    path = os.path.join(workdir, CONFIG)
    if os.path.isfile(path) and not _is_config(path):
        raise UserError(
            f'{path} is not the config of a run, and a run would replace it: use another '
            '--workdir, or move the file away.',
            kind='conflict',
            file=path,
        )
    for name in OF_SEVERAL:
        path = os.path.join(workdir, name)
        if os.path.exists(path):
            raise UserError(
                f'{workdir} contains several runs ({name}): use another --workdir.',
                kind='conflict',
                file=path,
            )


def _is_config(path):
    """Whether a file is the config of a run."""
    try:
        return read_json(path, dict).keys() >= NEEDED
    except UserError:
        return False


def require_no_run(directory: str) -> None:
    """Raises UserError if a directory for several runs contains one run, or a model."""
    path = os.path.join(directory, CONFIG)
    if os.path.exists(path):
        raise UserError(
            f'{directory} contains a run or a model ({path}): use another --workdir.',
            kind='conflict',
            file=path,
        )


def require_apart(workdir: str, dataset: ConfigDict) -> None:
    """Raises UserError if the workdir is in the image folder, where it would look like a class.

    Args:
      workdir: the directory of the run.
      dataset: the section `dataset` of the config.
    """
    if dataset.name in ('', 'digits'):  # no image folder
        return
    root = os.path.expanduser(dataset.name)
    split = os.path.join(root, re.split(r'[\[+]', dataset.train_split)[0])
    photos = os.path.realpath(split if os.path.isdir(split) else root)
    if pathlib.Path(os.path.realpath(workdir)).is_relative_to(photos):
        raise UserError(
            f'--workdir {workdir} is in {photos}, whose folders dataset.name uses as classes: '
            'use another --workdir.',
            kind='conflict',
            field='--workdir',
            file=photos,
        )


def require_same_run(
    workdir: str, old: tuple[Mapping, Sequence[str]], config: Mapping, class_names: Sequence[str]
) -> None:
    """Raises UserError, with all differences, if a run cannot resume with this config.

    Args:
      workdir: the directory of the run.
      old: the recorded config and class names, from `begun`.
      config: the complete config of the resumed run.
      class_names: the class names of the data.
    """
    old_config, old_names = old
    lines = config_lib.differences(old_config, config)
    lines += _changed_classes(old_names, class_names)
    if lines and all(line.startswith(OF_DATA) for line in lines):
        raise UserError(
            f'{workdir} contains a run on other images:\n  '
            + '\n  '.join(lines)
            + '\n'
            + advice_on_changed_images(workdir),
            kind='conflict',
            file=workdir,
            value=lines,
        )
    if lines:
        raise UserError(
            f'{workdir} contains a run of another config. Use another --workdir, or make these '
            'fields equal:\n  ' + '\n  '.join(lines),
            kind='conflict',
            file=workdir,
            value=lines,
        )
    for field in ('num_steps', 'num_epochs'):
        if old_config[field] != config[field]:
            log.warning(
                '%s was %s and is now %s: the learning-rate schedule changes with the '
                'length of the run',
                field,
                old_config[field],
                config[field],
            )


def advice_on_changed_images(workdir: str) -> str:
    """Advice for a run whose images have changed since its start."""
    return (
        'Restore them to resume this run. To train on the current images, start a new run '
        f'with the weights of this one: another --workdir, and --config.pretrained={workdir}'
    )


def _changed_classes(old_names, new_names):
    """A list with one line for the first difference between class names; [] if they are equal."""
    if len(old_names) != len(new_names):
        return [f'classes: {len(old_names)} in the workdir, {len(new_names)} in the data now']
    for number, (old, new) in enumerate(zip(old_names, new_names, strict=True)):
        if old != new:
            return [_changed_class(number, old, new)]
    return []


def _changed_class(number, old, new):
    """The line for a class whose name has changed."""
    if composed(old) != composed(new):
        return f'classes: number {number} is {old!r} in the workdir, {new!r} in the data now'
    return (
        f'classes: number {number}, {old!r}, is {ascii(old)} in the workdir and {ascii(new)} in '
        'the data now. The names differ only in Unicode normalisation (macOS and some archives '
        'write NFD, others NFC): restore the old name of the folder, because the order of the '
        'images depends on it'
    )


def write(workdir: str, config: ConfigDict, class_names: Sequence[str]) -> None:
    """Writes the class names and the config, on process 0 only."""
    if consensus.is_main():
        write_json(os.path.join(workdir, CLASSES), list(class_names))
        write_json(os.path.join(workdir, CONFIG), config.to_dict())
