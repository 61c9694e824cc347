"""The files of a workdir that say which run it has: config, class names, log and lock."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import Formatter, UserError, composed, is_utf8, writing
from vit_jax.processes import consensus

log = logging.getLogger(__name__)

CONFIG, CLASSES, LOCK, LOG = 'config.json', 'classes.json', '.lock', 'train.log'
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


def make(workdir: str) -> None:
    """Makes the directory if it is missing; UserError for what is none, or cannot be written."""
    if '://' in workdir:
        raise UserError(
            f'--workdir {workdir} is no directory of this machine: mount the bucket '
            '(docs/scale.md), and name a directory there.'
        )
    if not is_utf8(workdir):
        raise UserError(f'--workdir {workdir!r} is not in UTF-8: name another directory.')
    try:
        os.makedirs(workdir, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        what = (
            'is a link to nothing'
            if os.path.islink(workdir)
            else 'is a file'
            if os.path.isfile(workdir)
            else 'is below a file'
        )
        raise UserError(f'--workdir {workdir} {what}: name a directory.') from None
    except OSError as error:
        raise UserError(
            f'--workdir {workdir!r} cannot be made ({error.strerror}): name a '
            'directory that can be written.'
        ) from error
    if not os.access(workdir, os.W_OK | os.X_OK):
        raise UserError(
            f'--workdir {workdir} cannot be written (read-only, or of another user): '
            'name a directory that can be written.'
        )
    for path in (os.path.join(workdir, name) for name in os.listdir(workdir)):
        if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
            raise UserError(
                f'{path} is a pipe, and opening it would wait for ever: remove it, or '
                'take another --workdir.'
            )


class LogFile(logging.FileHandler):
    """A log file without which the run goes on, after one message, when it cannot be written."""

    failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, and opens the file for the first one."""
        try:
            if not self.failed:
                super().emit(record)
        except OSError:  # it cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord | None) -> None:  # noqa: N802 - the name of logging
        """Says what is wrong, once, instead of a traceback for every line."""
        self.failed = True
        log.warning(
            '%s cannot be written (%s): the run goes on without it',
            self.baseFilename,
            storage_error(sys.exc_info()[1]),
        )

    def close(self) -> None:
        """Closes the file, which tries once more to write a line that it could not."""
        try:
            super().close()
        except OSError:
            if not self.failed:
                self.handleError(None)


def log_to(workdir: str) -> logging.Handler:
    """Adds the project's log lines to the workdir's train.log, and makes the directory."""
    make(workdir)
    handler = LogFile(os.path.join(workdir, LOG), encoding='utf-8', delay=True)
    handler.setFormatter(Formatter('%(asctime)s %(levelname)s %(message)s'))
    # First, so that what it has to say of itself stands before the line that it could not write.
    logging.getLogger('vit_jax').handlers.insert(0, handler)
    return handler


@contextlib.contextmanager
def removed_if_refused(workdir: str) -> Iterator[None]:
    """A context for a run whose workdir does not stay when a UserError ends it before it begins.

    A directory that was there before stays. So does one with any file but the log and the lock.
    """
    missing = []  # the directories that the run makes, from the workdir upwards
    path = os.path.abspath(workdir)
    while '://' not in workdir and is_utf8(path) and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        yield
    except UserError:
        if missing and consensus.is_main():
            _remove_empty_run(missing)
        raise


def _remove_empty_run(directories):
    """Removes a workdir and the directories above it, as far as they hold nothing else."""
    workdir = directories[0]
    if not os.path.isdir(workdir) or not {LOG, LOCK} >= set(os.listdir(workdir)):
        return
    logger = logging.getLogger('vit_jax')
    for handler in logger.handlers[:]:  # they would open the file again
        if isinstance(handler, LogFile) and os.path.dirname(handler.baseFilename) == workdir:
            logger.removeHandler(handler)
            handler.close()
    with contextlib.suppress(OSError):
        for name in os.listdir(workdir):
            os.remove(os.path.join(workdir, name))
        for directory in directories:
            os.rmdir(directory)


def lock(workdir: str) -> contextlib.ExitStack:
    """Makes the workdir and reserves it for this run until what is returned is closed.

    Raises UserError when another run is training in it, or processes have different directories.
    """
    path = os.path.join(workdir, LOCK)

    def reserve():
        make(workdir)
        try:
            file = stack.enter_context(open(path, 'a', encoding='utf-8'))  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f'another process is training in {workdir}. Wait for it, stop it, or '
                'take another --workdir.'
            ) from error
        except OSError as error:
            raise UserError(
                f'{path} cannot be written ({error.strerror}), which reserves the '
                'workdir for this run: remove it, or take another --workdir.'
            ) from error

    with contextlib.ExitStack() as stack:
        consensus.from_main(reserve)
        found = consensus.gather(os.path.exists(path))
        if not all(found):
            raise UserError(
                f'process {found.index(False)} does not find the workdir {workdir} of '
                'process 0: it must be a directory on storage that all hosts share.'
            )
        return stack.pop_all()


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
                f'{"an object" if section else "a value"}: restore the file.'
            )
    config_lib.check_recorded(config, path)
    path = os.path.join(workdir, CLASSES)
    classes = read_json(path, list)
    if wrong := [name for name in classes if not isinstance(name, str)]:
        raise UserError(
            f'{path} holds {json.dumps(wrong[0]):.80}, expected the names of the '
            'classes: restore the file.'
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
            '--workdir.'
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
            '--workdir, or move the file away.'
        )
    if found := [name for name in OF_SEVERAL if os.path.exists(os.path.join(workdir, name))]:
        raise UserError(f'{workdir} holds several runs ({found[0]}): take another --workdir.')


def require_no_run(directory: str) -> None:
    """Raises UserError if the directory of several runs has one run, or a model."""
    if os.path.exists(path := os.path.join(directory, CONFIG)):
        raise UserError(f'{directory} holds a run or a model ({path}): take another --workdir.')


def require_apart(workdir: str, dataset: ConfigDict) -> None:
    """Raises UserError for a workdir among the photos of `config.dataset`, as one more class."""
    is_place = dataset.name not in ('', 'digits')  # for which no directory is taken
    root = os.path.expanduser(dataset.name)
    split = os.path.join(root, re.split(r'[\[+]', dataset.train_split)[0])
    photos = os.path.realpath(split if os.path.isdir(split) else root)
    if is_place and pathlib.Path(os.path.realpath(workdir)).is_relative_to(photos):
        raise UserError(
            f'--workdir {workdir} is in {photos}, whose folders dataset.name takes for '
            'classes: take another --workdir.'
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
            + ways_out_of_other_images(workdir)
        )
    if lines:
        raise UserError(
            f'{workdir} holds a run of another config. Take another --workdir, or make these '
            'fields equal:\n  ' + '\n  '.join(lines)
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


def write(workdir: str, config: Mapping, class_names: Sequence[str]) -> None:
    """Writes class names and config, on process 0 only."""
    if consensus.is_main():
        write_json(os.path.join(workdir, CLASSES), list(class_names))
        write_json(os.path.join(workdir, CONFIG), config.to_dict())


def write_json(path: str, value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + '\n')


def write_text(path: str, text: str) -> None:
    """Writes a text file, whole or not at all, also if the machine fails.

    Raises UserError where it cannot be written.
    """
    with writing(path) as temporary, open(temporary, 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_text(path: str) -> str:
    """The text of a file; OSError for what could be read for ever, ValueError if not UTF-8."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError('it is not a regular file')
    with open(path, encoding='utf-8') as file:
        return file.read()


def read_json(path: str, kind: type) -> Any:
    """The dict or list (`kind`) in a JSON file; UserError if the file cannot be read or differs."""
    expected = 'an object' if kind is dict else 'a list'
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f'{path} cannot be read ({error}), expected {expected} of JSON: restore '
            'the file, or name another directory.'
        ) from error
    if not isinstance(value, kind):
        raise UserError(
            f'{path} holds {json.dumps(value):.80}, expected {expected}: restore the file.'
        )
    return value


def storage_error(error: BaseException | None) -> str:
    """'No space left on device' for an error that comes from the storage, '' for others."""
    while error is not None:
        # TensorStore has it in its text only.
        text = re.search(r"(?:OS error |Errno |os_error_code=')(\d+)", str(error))
        if number := getattr(error, 'errno', None) or (text and int(text[1])):
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return ''


def require_not_scarce(error: BaseException, what: str) -> None:
    """Raises UserError where not the file but the machine is why `what` could not be read."""
    reason = storage_error(error)
    if reason in map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)):
        raise UserError(
            f'{what} cannot be read: {reason}. It was left as it is. Raise the limit '
            '(`ulimit -a` shows all) and run the same command again.'
        ) from error
