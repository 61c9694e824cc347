"""Saves and restores the training state with Orbax, and verifies every restored bit.

A checkpoint contains the state and its fingerprint: one 32-bit checksum per array, computed on the
devices. Orbax detects a missing file but not a flipped bit; the fingerprint detects both.
"""

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree
from orbax.checkpoint.checkpoint_managers import preservation_policy

from vit_jax.errors import UserError, some
from vit_jax.files import is_special, write_json
from vit_jax.processes import consensus
from vit_jax.workdir import fingerprint, record, storage_errors
from vit_jax.workdir.scores import Scores

log = logging.getLogger(__name__)

BEST = 'best.json'  # names the best checkpoint for the user; no program reads it
FIELDS = 'fields'  # the name of the fields of config.of_weights in the extra values of a checkpoint


class OtherStepError(ValueError):
    """A checkpoint contains the state of another step than its folder name says."""


class Snapshot(NamedTuple):
    """The state of a run after a step.

    Attributes:
      state: the training state.
      step: number of steps that the state has been trained for.
      extra: further values, as in JSON; empty for a new run.
    """

    state: PyTree
    step: int
    extra: Mapping[str, Any]


class _KeepBest:
    """Tells Orbax to keep the checkpoint with the best score."""

    def __init__(self):
        self.scores = Scores()

    def should_preserve(self, checkpoints: Sequence, *, context: Any) -> list[bool]:
        """Whether to keep each checkpoint; of equally good checkpoints the newest is kept."""
        del context
        best = self.scores.best_of([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step == best for checkpoint in checkpoints]


class Checkpointer:
    """The checkpoints of one run.

    Attributes:
      directory: absolute path of the checkpoints, with one folder per saved step.
    """

    def __init__(
        self,
        workdir: str,
        keep: int,
        keep_best: bool,
        keep_every: int = 0,
        fields: Mapping[str, Any] | None = None,
    ):
        """Opens the directory of checkpoints, and creates it if it is missing.

        Args:
          workdir: the directory of the run.
          keep: number of newest checkpoints to keep.
          keep_best: whether to keep the best checkpoint as well.
          keep_every: also keep the checkpoints whose step is a multiple of this number; 0: none.
          fields: the fields of config.of_weights, saved in each checkpoint, so that readers notice
            a config.json of another model.
        """
        self._fields = dict(fields or {})
        self.directory = record.checkpoint_directory(workdir)
        # The step and the bytes of the checkpoint being saved.
        self._saving = (0, 0)
        self._best_file = os.path.join(workdir, BEST)
        self._step_in_best_file = None
        self._keep_best = _KeepBest() if keep_best else None
        self._policies = [preservation_policy.LatestN(keep)]
        if keep_best:
            self._policies.append(self._keep_best)
        if keep_every:
            self._policies.append(preservation_policy.EveryNSteps(keep_every))
        self._open()

    def _open(self):
        policy = preservation_policy.AnyPreservationPolicy(self._policies)
        with self._explained():
            # lightweight_initialize: do not read the metrics that earlier versions saved.
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policy,
                    cleanup_tmp_directories=True,
                    lightweight_initialize=True,
                ),
            )

    def best_saved(self, scores: Scores) -> int | None:
        """The saved step with the best score, or None."""
        return scores.best_of(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: PyTree,
        extra: Mapping[str, Any] | None = None,
        scores: Scores | None = None,
    ) -> None:
        """Starts saving the state after `step`, unless the same state is saved already.

        Returns when the state is copied from the devices.

        Args:
          step: number of steps that the state has been trained for.
          state: the training state.
          extra: further values for the resumed run, as in JSON.
          scores: the scores of all evaluations so far; with `keep_best` they select the best
            checkpoint.

        Raises:
          UserError: a checkpoint of this step with another state exists, or nothing can be written.
        """
        scores = scores or Scores()
        self.wait(scores)
        if self._keep_best:
            self._keep_best.scores = scores
        if step in self._manager.all_steps():
            self._require_same(step, state)
            return
        self._saving = step, _bytes_of(state)
        extra = dict(extra or {})
        if self._fields:
            extra[FIELDS] = self._fields
        text = json.dumps(extra)
        meta = {'fingerprint': fingerprint.describe(state), 'extra': text, 'extra_crc': _crc(text)}
        with self._explained():
            saved = self._manager.save(
                step,
                force=True,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
                ),
            )
        if not saved:
            raise RuntimeError(f'the checkpoint of step {step} was not saved to {self.directory}')

    def restore_latest(self, abstract_state: PyTree) -> Snapshot | None:
        """Restores the newest checkpoint that can be read.

        A checkpoint that cannot be read, or whose arrays differ from its fingerprint, is renamed to
        bad-STEP as soon as an older checkpoint is restored.

        Args:
          abstract_state: a tree of jax.ShapeDtypeStruct with the shardings to restore to.

        Returns:
          The state and its extra values, or None if nothing was saved.

        Raises:
          UserError: no checkpoint can be read, or a checkpoint contains another state.
        """
        reasons = {}  # by the step of a checkpoint that cannot be read
        for step in consensus.from_main(lambda: sorted(self._manager.all_steps(), reverse=True)):
            snapshot, reason = self._restore(step, abstract_state)
            if reason:
                reasons[step] = reason
                continue
            if reasons:
                self._rename_bad(reasons)
                log.warning('falling back to the checkpoint of step %d', step)
            return snapshot
        if reasons:
            lines = '\n'.join(f'  {step}: {reason}' for step, reason in reasons.items())
            raise UserError(
                f'none of the checkpoints in {self.directory} can be read:\n{lines}\n'
                'They are unchanged. To train from the beginning, move that '
                'directory away or use another --workdir.',
                kind='unreadable',
                file=self.directory,
            )
        return None

    def _rename_bad(self, reasons):
        """Renames the checkpoints of the steps in `reasons` to bad-STEP."""
        for step, reason in reasons.items():
            target = consensus.from_main(functools.partial(self._set_aside, step))
            log.warning(
                'checkpoint of step %d cannot be used and is now %s: %s', step, target, reason
            )
        self._manager.close()
        self._open()

    def wait(self, scores: Scores | None = None) -> int | None:
        """Waits until everything is on disk.

        Args:
          scores: with `keep_best`, best.json then names the best checkpoint by these scores.

        Returns:
          The newest saved step, or None.

        Raises:
          UserError: a checkpoint cannot be written; the message names the last good one.
        """
        with self._explained():
            self._manager.wait_until_finished()
        if scores and self._keep_best and consensus.is_main():
            self._write_best(scores)
        return self._manager.latest_step()

    def _write_best(self, scores):
        """Writes best.json if the best checkpoint has changed."""
        best = self.best_saved(scores)
        if best in (None, self._step_in_best_file):
            return
        self._step_in_best_file = best
        content = {
            'step': best,
            scores.metric: scores.values[best],
            'checkpoint': os.path.join(record.CHECKPOINTS, str(best)),
        }
        try:
            write_json(self._best_file, content)
        except UserError as error:  # training does not need the file
            log.warning('%s', error)

    def last_good(self) -> str:
        """A sentence that names the newest complete checkpoint."""
        last = max(record.saved_steps(self.directory), default=None)
        if last is None:
            return 'No checkpoint had been written yet.'
        return f'The last good checkpoint, of step {last}, is in {self.directory}.'

    def require_room(self, state: PyTree, kept: int) -> None:
        """Raises UserError unless the disk has room for the checkpoints of the run.

        Args:
          state: the training state, for its size.
          kept: number of checkpoints that the run keeps; one more is being written.
        """
        size = _bytes_of(state)

        def check():
            used = self._bytes_on_disk()
            disk = shutil.disk_usage(self.directory)
            needed = (kept + 1) * size - used
            if needed > disk.free and disk.total:  # some network storage reports 0 for both
                raise UserError(
                    f'{self.directory} has {_amount(disk.free)} free and the run needs '
                    f'{_amount(needed)} more: it keeps {kept} checkpoints of {_amount(size)} '
                    'while it writes the next one. Free space, lower keep_checkpoints or raise '
                    'keep_every, or use another --workdir.',
                    kind='resource',
                    file=self.directory,
                    value=needed,
                )

        consensus.from_main(check)

    def _bytes_on_disk(self):
        """The size of the saved checkpoints, without checkpoints that were renamed to bad-STEP."""
        size = 0
        for step in record.saved_steps(self.directory):
            for folder, _, names in os.walk(os.path.join(self.directory, str(step))):
                size += sum(os.path.getsize(os.path.join(folder, name)) for name in names)
        return size

    def close(self) -> None:
        with self._explained():
            self._manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Converts an error of the storage in this context to a UserError."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Orbax and TensorStore raise many kinds
            reason = storage_errors.reason(error)
            if not reason:
                raise
            step, size = self._saving
            name = f'the checkpoint of step {step} ({_amount(size)})' if size else 'checkpoints'
            raise UserError(
                f'{name} cannot be written: {reason}. {self.last_good()} Fix the cause and '
                'run the same command again.',
                kind='unwritable',
                file=self.directory,
            ) from error

    def _require_same(self, step, state):
        """Raises UserError unless the checkpoint of `step` contains this state."""
        folder = epath.Path(self.directory) / str(step)

        def read():
            try:
                return read_meta(folder)['fingerprint']
            except Exception as error:  # Orbax raises many kinds for a damaged file
                storage_errors.require_not_scarce(error, str(folder))
                return None

        if consensus.from_main(read) != fingerprint.describe(state):
            raise UserError(
                f'the checkpoint of step {step} cannot be saved: {folder} exists and contains '
                'another state. Move it away and run the same command again.',
                kind='conflict',
                file=str(folder),
            )

    def _restore(self, step, abstract_state):
        """Returns (snapshot, '') or (None, why it is unusable), the same on all processes."""
        reason = ''
        try:
            state, meta = self._read(step, abstract_state)
            saved = meta['fingerprint']
            extra = extra_of(meta)
        except (UserError, MemoryError, PermissionError):
            raise  # the files are not damaged
        except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
            if 'RESOURCE_EXHAUSTED' in str(error):
                raise
            storage_errors.require_not_scarce(
                error, f'the checkpoint of step {step} in {self.directory}'
            )
            reason = first_line(error)
        # If one process cannot read the checkpoint, no process uses it.
        reason = next(filter(None, consensus.gather(reason)), '')
        if reason:
            return None, reason
        checksums = fingerprint.describe(state)  # computed by all processes together
        names = [name for name in checksums if saved[name] != checksums[name]]
        if names:
            return None, f'{len(names)} arrays differ from the saved ones, the first is {names[0]}'
        self._require_same_fields(step, extra.get(FIELDS, {}))
        extra = {name: value for name, value in extra.items() if name != FIELDS}
        return Snapshot(state, step, extra), ''

    def _require_same_fields(self, step, saved_fields):
        """Raises UserError if a run with another model or preprocessing saved the checkpoint."""
        lines = [
            f'{name}: {value!r} in the checkpoint, {self._fields[name]!r} in this run'
            for name, value in saved_fields.items()
            if self._fields.get(name, value) != value
        ]
        if lines:
            raise UserError(
                f'the checkpoint of step {step} in {self.directory} belongs to another run. Move '
                'it away, or use another --workdir:\n  ' + some(lines, 10, '\n  '),
                kind='conflict',
                file=os.path.join(self.directory, str(step)),
                value=lines,
            )

    def _read(self, step, abstract_state):
        """(state, meta) of a step, see `read_meta`."""
        # The manager would wait for the other processes if this one failed.
        folder = epath.Path(self.directory) / str(step)
        meta = read_meta(folder)
        _require_same_arrays(meta['fingerprint'], abstract_state, folder)
        check_step(meta, folder)
        state = ocp.StandardCheckpointHandler().restore(
            folder / 'state', args=ocp.args.StandardRestore(abstract_state)
        )
        return state, meta

    def _set_aside(self, step):
        """Renames the checkpoint of a step to bad-STEP, or bad-STEP-1 and so on, and returns it."""
        path = os.path.join(self.directory, f'bad-{step}')
        names = itertools.chain([path], (f'{path}-{number}' for number in itertools.count(1)))
        target = next(name for name in names if not os.path.exists(name))
        os.rename(os.path.join(self.directory, str(step)), target)
        return target


def _require_same_arrays(saved, abstract_state, folder):
    """Raises UserError if a checkpoint has arrays of other names than the state of this run.

    Raises ValueError if the fingerprint does not belong to the arrays of the checkpoint.
    """
    expected = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(abstract_state)}
    if saved.keys() == expected:
        return
    tree = ocp.PyTreeCheckpointHandler().metadata(folder / 'state').tree
    paths = (jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree))
    if set(map(_words, paths)) != set(map(_words, saved)):
        raise ValueError('the fingerprint does not belong to the arrays of the checkpoint')
    only_saved = sorted(saved.keys() - expected)
    only_expected = sorted(expected - saved.keys())
    raise UserError(
        f'the checkpoint of step {folder.name} in {folder.parent} contains another state. Only in '
        f'the checkpoint: {only_saved or "nothing"}; only in this run: '
        f'{only_expected or "nothing"}. Another version of the program saved it: resume the run '
        'with that version.',
        kind='conflict',
        file=str(folder),
    )


def forget_best(workdir: str) -> None:
    """Removes best.json, which an earlier start with keep_best may have left."""
    if consensus.is_main():
        pathlib.Path(workdir, BEST).unlink(missing_ok=True)


def read_meta(folder: epath.Path) -> dict[str, Any]:
    """Reads fingerprint and extra values of a checkpoint. Call this before reading the state.

    Raises:
      ValueError: the checkpoint contains a pipe or a device, whose reading might never end.
      PermissionError: a file may not be read; Orbax would report it as missing.
    """

    def raise_if_denied(error):
        if isinstance(error, PermissionError):
            raise error

    for directory, _, names in os.walk(folder, onerror=raise_if_denied):
        for name in names:
            path = os.path.join(directory, name)
            if is_special(path):
                raise ValueError(f'{path} is neither a file nor a directory')
            if os.path.exists(path) and not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return ocp.JsonCheckpointHandler().restore(folder / 'meta', args=ocp.args.JsonRestore())


def extra_of(meta: dict[str, Any]) -> dict[str, Any]:
    """The extra values of a checkpoint; empty for checkpoints of earlier versions.

    Args:
      meta: the result of `read_meta`.

    Raises:
      ValueError: the values do not match their checksum.
    """
    text = meta.get('extra', '{}')
    if _crc(text) != meta.get('extra_crc', _crc('{}')):
        raise ValueError('its meta item differs from the saved one')
    return json.loads(text)


def check_step(meta: dict[str, Any], folder: epath.Path) -> None:
    """Raises OtherStepError unless a checkpoint contains the state of the step in its name.

    Args:
      meta: the result of `read_meta`.
      folder: the folder of the checkpoint.
    """
    step = meta['fingerprint']['.step']  # the checksum of a scalar is its value
    if step != int(folder.name):
        raise OtherStepError(
            f'{folder} contains the state of step {step}: the name of the folder and the step '
            f'differ. If it was renamed, give it the name {step} again.'
        )


def _crc(text):
    return zlib.crc32(text.encode())


def _words(path):
    """A path in a tree as names, without the syntax of dicts and classes."""
    return tuple(re.findall(r'\w+', path))


def _bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _amount(size):
    if size >= 1e8:
        return f'{size / 1e9:,.1f} GB'
    return f'{size / 1e6:,.1f} MB'


def first_line(error: Exception) -> str:
    """The first line of a message of Orbax or TensorStore, which may be pages long."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0][:300]
