"""Which run a workdir has: its config and class names, and whether another run may use it."""

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
RECIPE = 'recipe.json'  # the file that --config named, and its fields without those overridden
OF_SEVERAL = ('sweep.json', 'vtab.json')  # in the directory of several runs
# What the data decide: lines of differences that begin so follow from other images.
OF_DATA = ('classes:', 'dataset.num_examples:', 'dataset.num_classes:')
# Fields that every version has written.
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
    """(workdir, None) if the path is a workdir, (workdir, step) if it is a checkpoint of one."""
    if os.path.isdir(checkpoint_directory(path)):
        return path, None
    folder, step = os.path.split(os.path.abspath(path))
    is_checkpoint = is_step(step) and os.path.basename(folder) == CHECKPOINTS
    if is_checkpoint and os.path.isdir(path):
        return os.path.dirname(folder), int(step)
    return None


def is_step(name: str) -> bool:
    """Whether a folder of that name is the checkpoint of a step: '48', but not '²' or '048'."""
    return name.isascii() and name.isdecimal() and (name == '0' or name[0] != '0')


def checkpoint_directory(workdir: str) -> str:
    """Where the checkpoints of a run are; an absolute path, as Orbax requires."""
    return os.path.join(os.path.abspath(workdir), CHECKPOINTS)


def read(workdir: str) -> tuple[dict[str, Any], list[str]]:
    """Config and class names of a run, as JSON has them; UserError where they cannot be read."""
    path = os.path.join(workdir, CONFIG)
    config, expected = read_json(path, dict), config_lib.base().to_dict()
    for field in NEEDED | (config.keys() & expected.keys()):
        found, section = config.get(field), isinstance(expected[field], dict)
        if isinstance(found, dict) != section or field not in config:
            raise UserError(
                f'{path} has {json.dumps(found):.80} for {field}, expected '
                f'{"an object" if section else "a value"}: restore the file.',
                kind='content',
                file=path,
                field=field,
                value=found,
            )
    config_lib.check_recorded(config, path)
    path = os.path.join(workdir, CLASSES)
    classes = read_json(path, list)
    wrong = [name for name in classes if not isinstance(name, str)]
    if wrong:
        raise UserError(
            f'{path} holds {json.dumps(wrong[0]):.80}, expected the names of the '
            'classes: restore the file.',
            kind='content',
            file=path,
            value=wrong[0],
        )
    return config_lib.with_unrecorded(config), classes


def saved_steps(directory: str) -> list[int]:
    """The steps whose checkpoints in a directory are complete; [] where it does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f'{directory} cannot be read ({error.strerror}): a run has its checkpoints '
            'in a directory of that name. Move what is there away, or take another '
            '--workdir.',
            kind='unreadable',
            file=directory,
        ) from error
    return [int(name) for name in names if is_step(name)]


def begun(workdir: str) -> tuple[dict[str, Any], list[str]] | None:
    """Config and class names of the run that has saved a checkpoint, the same on all processes.

    None where nothing has been saved: any run may use such a workdir. Raises UserError where it has
    what another program or command has written, and a run would replace.
    """
    return consensus.from_main(
        lambda: (
            read(workdir) if saved_steps(checkpoint_directory(workdir)) else _require_free(workdir)
        )
    )


def _require_free(workdir):
    path = os.path.join(workdir, CONFIG)
    try:
        foreign = os.path.isfile(path) and not read_json(path, dict).keys() >= NEEDED
    except UserError:
        foreign = True
    if foreign:
        raise UserError(
            f'{path} is not the config of a run, and would be replaced: take another '
            '--workdir, or move the file away.',
            kind='conflict',
            file=path,
        )
    for name in OF_SEVERAL:
        path = os.path.join(workdir, name)
        if os.path.exists(path):
            raise UserError(
                f'{workdir} holds several runs ({name}): take another --workdir.',
                kind='conflict',
                file=path,
            )


def require_no_run(directory: str) -> None:
    """Raises UserError if the directory of several runs has one run, or a model."""
    path = os.path.join(directory, CONFIG)
    if os.path.exists(path):
        raise UserError(
            f'{directory} holds a run or a model ({path}): take another --workdir.',
            kind='conflict',
            file=path,
        )


def require_apart(workdir: str, dataset: ConfigDict) -> None:
    """Raises UserError for a workdir among the photos of `config.dataset`, as one more class."""
    is_place = dataset.name not in ('', 'digits')  # for which no directory is taken
    root = os.path.expanduser(dataset.name)
    split = os.path.join(root, re.split(r'[\[+]', dataset.train_split)[0])
    photos = os.path.realpath(split if os.path.isdir(split) else root)
    if is_place and pathlib.Path(os.path.realpath(workdir)).is_relative_to(photos):
        raise UserError(
            f'--workdir {workdir} is in {photos}, whose folders dataset.name takes for '
            'classes: take another --workdir.',
            kind='conflict',
            field='--workdir',
            file=photos,
        )


def require_same_run(
    workdir: str, old: tuple[Mapping, Sequence[str]], config: Mapping, class_names: Sequence[str]
) -> None:
    """Raises UserError, with all differences, if the run of the workdir cannot be continued.

    `old` comes from `begun`; `config` is complete.
    """
    old_config, old_names = old
    lines = config_lib.differences(old_config, config)
    if len(old_names) != len(class_names):
        lines.append(
            f'classes: {len(old_names)} in the workdir, {len(class_names)} in the data now'
        )
    else:
        lines += [
            _other_class(number, was, now)
            for number, (was, now) in enumerate(zip(old_names, class_names, strict=True))
            if was != now
        ][:1]
    if lines and all(line.startswith(OF_DATA) for line in lines):
        raise UserError(
            f'{workdir} holds a run on other images:\n  '
            + '\n  '.join(lines)
            + '\n'
            + ways_out_of_other_images(workdir),
            kind='conflict',
            file=workdir,
            value=lines,
        )
    if lines:
        raise UserError(
            f'{workdir} holds a run of another config. Take another --workdir, or make these '
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


def ways_out_of_other_images(workdir: str) -> str:
    """What to do when the images are not those with which a run began."""
    return (
        'Restore them to resume this run. To train on the images as they are now, begin a new run '
        f'with the weights of this one: another --workdir, and --config.pretrained={workdir}'
    )


def _other_class(number, was, now):
    """The line for a class that has another name than before."""
    if composed(was) != composed(now):
        return f'classes: number {number} is {was!r} in the workdir, {now!r} in the data now'
    return (
        f'classes: number {number}, {was!r}, is {ascii(was)} in the workdir and {ascii(now)} in '
        'the data now. The names differ in Unicode normalisation only (NFC and NFD), as macOS and '
        'some archives write them: rename the folder as it was, because the order of images '
        'depends on it'
    )


def write(workdir: str, config: ConfigDict, class_names: Sequence[str]) -> None:
    """Writes class names and config, on process 0 only."""
    if consensus.is_main():
        write_json(os.path.join(workdir, CLASSES), list(class_names))
        write_json(os.path.join(workdir, CONFIG), config.to_dict())
