"""Saves and restores the training state with Orbax, and proves that it returns as it was saved.

A checkpoint holds the state and a fingerprint of it: one 32-bit checksum per array, computed on
the devices. Orbax notices a missing file but not a flipped bit, which the fingerprint notices.
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

BEST = 'best.json'  # names the best checkpoint, for people
FIELDS = 'fields'  # of what is saved beside a state: those of config.of_weights


class OtherStepError(ValueError):
    """A checkpoint holds the state of another step than the name of its folder says."""


class Snapshot(NamedTuple):
    """The state of a run after a step, and what is saved beside it."""

    state: PyTree
    step: int
    extra: Mapping[str, Any]  # what JSON can hold; empty where nothing was saved


class _KeepBest:
    """Asks Orbax to keep the checkpoint that has the best of the `scores`."""

    def __init__(self):
        self.scores = Scores()

    def should_preserve(self, checkpoints: Sequence, *, context: Any) -> list[bool]:
        """Answers for each checkpoint; of several equal ones the newest is kept."""
        del context
        best = self.scores.best_of([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step == best for checkpoint in checkpoints]


class Checkpointer:
    """The checkpoints of one run: the newest `keep` and, with `keep_best`, the best.

    With `keep_every` the checkpoints of steps that it divides are kept, too. They are in
    `directory`, an absolute path, one folder per saved step. Each checkpoint has `fields`, from
    config.of_weights, so that readers notice a config.json of another model.
    """

    def __init__(
        self,
        workdir: str,
        keep: int,
        keep_best: bool,
        keep_every: int = 0,
        fields: Mapping[str, Any] | None = None,
    ):
        self._fields = dict(fields or {})
        self.directory = record.checkpoint_directory(workdir)
        self._saving = (0, 0)  # step and bytes
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
            # Initialised without reading metrics, which other versions have left there.
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policy,
                    cleanup_tmp_directories=True,
                    lightweight_initialize=True,
                ),
            )

    def best_saved(self, scores: Scores) -> int | None:
        """The best of the saved steps that have a score."""
        return scores.best_of(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: PyTree,
        extra: Mapping[str, Any] | None = None,
        scores: Scores | None = None,
    ) -> None:
        """Starts saving the state after `step`, unless the same state has been saved.

        It returns when the state has been copied from the devices.

        Args:
          extra: what JSON can hold; returns with the state when the run resumes from it.
          scores: of all evaluations until now; with `keep_best` they decide what is kept.

        Raises:
          UserError: if a checkpoint of this step has another state: the new one is not saved.
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
        """The newest readable checkpoint, or None where nothing has been saved.

        `abstract_state` has jax.ShapeDtypeStruct leaves with the shardings to restore to. A
        checkpoint that cannot be read, or whose arrays differ from those that were saved, is
        renamed to bad-STEP once an older one has been read. UserError if there is no older one, or
        if a checkpoint is of another state.
        """
        bad = {}
        for step in consensus.from_main(lambda: sorted(self._manager.all_steps(), reverse=True)):
            snapshot, reason = self._restore(step, abstract_state)
            if reason:
                bad[step] = reason
                continue
            for bad_step, reason in bad.items():
                target = consensus.from_main(functools.partial(self._set_aside, bad_step))
                log.warning(
                    'checkpoint of step %d cannot be used and is now %s: %s',
                    bad_step,
                    target,
                    reason,
                )
            if bad:
                log.warning('falling back to the checkpoint of step %d', step)
                self._manager.close()
                self._open()
            return snapshot
        if bad:
            reasons = '\n'.join(f'  {step}: {reason}' for step, reason in bad.items())
            raise UserError(
                f'none of the checkpoints in {self.directory} can be read:\n{reasons}\n'
                'They were left as they are. To train from the beginning, move that '
                'directory away or take another --workdir.'
            )
        return None

    def wait(self, scores: Scores | None = None) -> int | None:
        """The newest step, when everything is on disk.

        With `keep_best`, best.json then names the best checkpoint by the `scores`.

        Raises UserError, which names the last good checkpoint, where one cannot be written.
        """
        with self._explained():
            self._manager.wait_until_finished()
        if scores and self._keep_best and consensus.is_main():
            self._write_best(scores)
        return self._manager.latest_step()

    def _write_best(self, scores):
        """Writes best.json if another checkpoint is the best than the file names."""
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
        except UserError as error:  # nothing needs the file
            log.warning('%s', error)

    def last_good(self) -> str:
        """A sentence that names the newest checkpoint that is complete."""
        last = max(record.saved_steps(self.directory), default=None)
        return (
            'No checkpoint had been written yet.'
            if last is None
            else f'The last good checkpoint, of step {last}, is in {self.directory}.'
        )

    def require_room(self, state: PyTree, kept: int) -> None:
        """Raises UserError unless `kept` checkpoints and the one being written have room."""
        size = _bytes_of(state)

        def check():
            there = sum(
                os.path.getsize(os.path.join(folder, name))
                for step in record.saved_steps(self.directory)  # none that is set aside
                for folder, _, names in os.walk(os.path.join(self.directory, str(step)))
                for name in names
            )
            disk = shutil.disk_usage(self.directory)
            needed = (kept + 1) * size - there
            if needed > disk.free and disk.total:  # some network storage tells neither
                raise UserError(
                    f'{self.directory} has {_amount(disk.free)} free and the run needs '
                    f'{_amount(needed)} more: it keeps {kept} checkpoints of {_amount(size)} '
                    'while it writes the next one. Make room, keep fewer by keep_checkpoints and '
                    'keep_every, or take another --workdir.'
                )

        consensus.from_main(check)

    def close(self) -> None:
        with self._explained():
            self._manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """An error of the storage in this context becomes a UserError."""
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds
            if isinstance(error, UserError) or not (reason := storage_errors.reason(error)):
                raise
            step, size = self._saving
            what = f'the checkpoint of step {step} ({_amount(size)})' if size else 'checkpoints'
            raise UserError(
                f'{what} cannot be written: {reason}. {self.last_good()} Mend that and '
                'run the same command again.'
            ) from error

    def _require_same(self, step, state):
        """Raises UserError unless the checkpoint of `step` holds this state."""
        folder = epath.Path(self.directory) / str(step)

        def read():
            try:
                return read_meta(folder)['fingerprint']
            except Exception as error:  # Orbax raises many kinds for a damaged file
                storage_errors.require_not_scarce(error, str(folder))
                return None

        if consensus.from_main(read) != fingerprint.describe(state):
            raise UserError(
                f'the checkpoint of step {step} cannot be saved: {folder} exists and holds another '
                'state. Expected no folder of that name. Move it away and run the same command '
                'again.'
            )

    def _restore(self, step, abstract_state):
        """(snapshot, '') or (None, why the files cannot be used): the same on all processes."""
        reason = ''
        try:
            state, meta = self._read(step, abstract_state)
            saved = meta['fingerprint']
            extra = extra_of(meta)
        except (UserError, MemoryError, PermissionError):
            raise  # not the fault of the files
        except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
            if 'RESOURCE_EXHAUSTED' in str(error):
                raise
            storage_errors.require_not_scarce(
                error, f'the checkpoint of step {step} in {self.directory}'
            )
            reason = first_line(error)
        # What one process cannot read, none may use. The fingerprint needs all processes.
        reason = next(filter(None, consensus.gather(reason)), '')
        if reason:
            return None, reason
        found = fingerprint.describe(state)
        names = [name for name in found if saved[name] != found[name]]
        if names:
            return None, f'{len(names)} arrays differ from what was saved, first {names[0]}'
        self._require_same_fields(step, extra.get(FIELDS, {}))
        extra = {name: value for name, value in extra.items() if name != FIELDS}
        return Snapshot(state, step, extra), ''

    def _require_same_fields(self, step, saved_fields):
        """Raises UserError if a checkpoint was saved by a run of another model or images."""
        lines = [
            f'{name}: {value!r} in the checkpoint, {self._fields[name]!r} in this run'
            for name, value in saved_fields.items()
            if self._fields.get(name, value) != value
        ]
        if lines:
            raise UserError(
                f'the checkpoint of step {step} in {self.directory} is of another run. Move it '
                'away, or take another --workdir:\n  ' + some(lines, 10, '\n  ')
            )

    def _read(self, step, abstract_state):
        """The state of a step, and what else was saved, its fingerprint above all."""
        # Without the manager, which would wait for the other processes if this one failed.
        folder = epath.Path(self.directory) / str(step)
        meta = read_meta(folder)
        saved = meta['fingerprint']
        expected = {jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(abstract_state)}
        if saved.keys() != expected:
            tree = ocp.PyTreeCheckpointHandler().metadata(folder / 'state').tree
            found = (jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree))
            if set(map(_words, found)) != set(map(_words, saved)):
                raise ValueError('the fingerprint is not of the arrays beside it')
            raise UserError(
                f'the checkpoint of step {step} in {self.directory} is of another state. Only in '
                f'the checkpoint: {sorted(saved.keys() - expected) or "nothing"}; only in this '
                f'run: {sorted(expected - saved.keys()) or "nothing"}. It was saved by another '
                'version of the program; continue it with that one.'
            )
        check_step(meta, folder)
        return ocp.StandardCheckpointHandler().restore(
            folder / 'state', args=ocp.args.StandardRestore(abstract_state)
        ), meta

    def _set_aside(self, step):
        path = os.path.join(self.directory, f'bad-{step}')
        names = itertools.chain([path], (f'{path}-{number}' for number in itertools.count(1)))
        target = next(name for name in names if not os.path.exists(name))
        os.rename(os.path.join(self.directory, str(step)), target)
        return target


def forget_best(workdir: str) -> None:
    """Removes the best.json of an earlier start, from when the run kept its best checkpoint."""
    if consensus.is_main():
        pathlib.Path(workdir, BEST).unlink(missing_ok=True)


def read_meta(folder: epath.Path) -> dict[str, Any]:
    """What is saved beside the state of a checkpoint: its fingerprint above all.

    To be read first: ValueError if the checkpoint has a pipe or a device, whose reading never ends;
    PermissionError if it must not be read, which Orbax does not tell from what is not there.
    """

    def denied(error):
        if isinstance(error, PermissionError):
            raise error

    for directory, _, names in os.walk(folder, onerror=denied):
        for path in (os.path.join(directory, name) for name in names):
            if is_special(path):
                raise ValueError(f'{path} is neither a file nor a directory')
            if os.path.exists(path) and not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return ocp.JsonCheckpointHandler().restore(folder / 'meta', args=ocp.args.JsonRestore())


def extra_of(meta: dict[str, Any]) -> dict[str, Any]:
    """What JSON holds beside the state of a checkpoint; ValueError if it is not what was saved.

    `meta` is from `read_meta`. Older checkpoints have nothing.
    """
    text = meta.get('extra', '{}')
    if _crc(text) != meta.get('extra_crc', _crc('{}')):
        raise ValueError('its meta item differs from what was saved')
    return json.loads(text)


def check_step(meta: dict[str, Any], folder: epath.Path) -> None:
    """Raises OtherStepError unless the state in a checkpoint is of the step that its folder names.

    `meta` is from `read_meta`. The checksum of the state's step, a scalar, is its value.
    """
    step = meta['fingerprint']['.step']
    if step != int(folder.name):
        raise OtherStepError(
            f'{folder} holds the state of step {step}: the name of the folder and the step differ. '
            f'If it was renamed, give it the name {step} again.'
        )


def _crc(text):
    return zlib.crc32(text.encode())


def _words(path):
    """The names of a path in a tree, whose nodes may be dicts or classes."""
    return tuple(re.findall(r'\w+', path))


def _bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _amount(size):
    return f'{size / 1e9:,.1f} GB' if size >= 1e8 else f'{size / 1e6:,.1f} MB'


def first_line(error: Exception) -> str:
    """The beginning of what Orbax or TensorStore says, which may be pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
