"""What a run keeps in its workdir beside checkpoints and metrics: its config and class names."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import time

from ml_collections import ConfigDict

from vit_jax import config as config_lib
from vit_jax.errors import UserError
from vit_jax.processes import hosts

log = logging.getLogger(__name__)


def make(workdir: str) -> None:
    """Makes the directory where it is missing; UserError if it cannot be made."""
    try:
        os.makedirs(workdir, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        what = 'is a file' if os.path.isfile(workdir) else 'is below a file'
        raise UserError(f'--workdir {workdir} {what}: name a directory.') from None
    except OSError as error:
        raise UserError(f'--workdir {workdir} cannot be made ({error.strerror}): name a directory '
                        'that can be written.') from error


def lock(workdir: str) -> contextlib.ExitStack:
    """Makes the workdir and reserves it for this run until what is returned is closed.

    Raises:
      UserError: another run is training in it, or it is not the same directory on all processes.
    """
    with contextlib.ExitStack() as stack:
        mark = hosts.from_main(lambda: _reserve(workdir, stack))
        hosts.agree(_sees(workdir, mark), lambda seen: _require_shared(workdir, seen))
        return stack.pop_all()


def _reserve(workdir, stack):
    """Locks a file until the stack is left; returns what stands in it."""
    make(workdir)
    file = stack.enter_context(open(os.path.join(workdir, '.lock'), 'a', encoding='utf-8'))  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f'another process is training in {workdir}. Wait for it, stop it, or take '
                        'another --workdir.') from error
    mark = secrets.token_hex(8)
    file.truncate(0)
    file.write(mark)
    file.flush()
    os.fsync(file.fileno())
    return mark


def _sees(workdir, mark):
    """Whether this process finds the mark, which storage over a network may take time to show."""
    for _ in range(60):
        with (contextlib.suppress(OSError),
              open(os.path.join(workdir, '.lock'), encoding='utf-8') as file):
            if file.read() == mark:
                return True
        time.sleep(0.5)
    return False


def _require_shared(workdir, seen):
    if not all(seen):
        raise UserError(f'the workdir {workdir} of process {seen.index(False)} is not that of '
                        'process 0: it must be a directory on storage that all hosts share.')


def claim(workdir: str, config: ConfigDict, class_names: tuple[str, ...]) -> ConfigDict:
    """Compares with what the workdir was made for, on process 0.

    A workdir in which nothing was saved yet may be taken over by any config.

    Args:
      config: settled.
      class_names: in label order.

    Returns:
      The config with accum_steps as chosen earlier, when it is to be chosen automatically.

    Raises:
      UserError: the workdir belongs to another config or other classes; lists what differs.
    """
    old = recorded_config(workdir)
    if old is not None:
        lines = config_lib.differences(old, config)
        classes = hosts.from_main(lambda: _load(os.path.join(workdir, 'classes.json')))
        if classes != list(class_names):
            lines.append(_describe_classes(classes, list(class_names)))
        if lines:
            raise UserError(
                f'{workdir} holds a run of another config. Take another --workdir, or make these '
                'fields equal:\n  ' + '\n  '.join(lines))
        for field in ('num_steps', 'num_epochs'):
            if old[field] != config[field]:
                log.warning('%s was %s and is now %s: the learning-rate schedule changes with the '
                            'length of the run', field, old[field], config[field])
        config = config.copy_and_resolve_references()
        config.accum_steps = config.accum_steps or old['accum_steps']
    return config


def recorded_config(workdir: str) -> dict | None:
    """The config of a run that has saved something, None otherwise; UserError if unreadable."""
    def load():
        checkpoints = checkpoint_directory(workdir)
        if os.path.isdir(checkpoints) and os.listdir(checkpoints):
            return _load(os.path.join(workdir, 'config.json'))
        return None

    return hosts.from_main(load)


def record(workdir: str, config: ConfigDict, class_names: tuple[str, ...]) -> None:
    """Writes classes.json and config.json, on process 0."""
    if not hosts.is_main():
        return
    save(os.path.join(workdir, 'classes.json'), list(class_names))
    save(os.path.join(workdir, 'config.json'), config.to_dict())


def save(path: str, value) -> None:
    """Writes a JSON file, whole or not at all."""
    with open(path + '.tmp', 'w', encoding='utf-8') as file:
        json.dump(value, file, indent=2)
        file.write('\n')
    os.replace(path + '.tmp', path)


def checkpoint_directory(workdir: str) -> str:
    """Where the checkpoints of a run are."""
    return os.path.join(workdir, 'checkpoints')


def where_to_go_on(workdir: str) -> str:
    """' from step N' with the newest checkpoint, '' when there is none."""
    with contextlib.suppress(OSError):
        steps = [int(name) for name in os.listdir(checkpoint_directory(workdir)) if name.isdigit()]
        return f' from step {max(steps)}' if steps else ''
    return ''


def _describe_classes(old, new):
    if len(old) != len(new):
        return f'classes: {len(old)} in the workdir, {len(new)} in the data now'
    k = next(k for k in range(len(old)) if old[k] != new[k])
    return f'classes: number {k} is {old[k]!r} in the workdir, {new[k]!r} in the data now'


def _load(path):
    try:
        with open(path, encoding='utf-8') as file:
            return json.load(file)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f'{path} cannot be read ({error}). The run cannot be checked against it: '
                        'restore the file, or take another --workdir.') from error
