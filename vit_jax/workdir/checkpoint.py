"""Saves and restores the training state with Orbax, and proves that it returns as it was saved.

A checkpoint holds the state and a fingerprint of it: one 32-bit checksum per array, computed on
the devices. Orbax notices a missing file but not a flipped bit, which the fingerprint notices.
"""

import itertools
import logging
import math
import operator
import os

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import Array, PyTree, UInt32
from orbax.checkpoint.checkpoint_managers import preservation_policy

from vit_jax.errors import UserError
from vit_jax.processes import consensus
from vit_jax.workdir import record

log = logging.getLogger(__name__)

_accuracy = operator.itemgetter('eval/accuracy')


@jax.jit
def fingerprint(tree: PyTree) -> PyTree:
    """One checksum per array of the tree: the sum of its bits times odd weights, modulo 2**32.

    It is the same on any mesh, because integer sums do not depend on their order. A flipped bit
    always changes it by a power of two times an odd number. Arrays: float or int, 16 or 32 bits.
    """
    return jax.tree.map(_checksum, tree)


def _checksum(x: Array) -> UInt32[Array, '']:
    bits = jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}').astype(jnp.uint32)
    strides = [math.prod(x.shape[d + 1:]) for d in range(x.ndim)]
    index = sum((jax.lax.broadcasted_iota(jnp.uint32, x.shape, d) * jnp.uint32(s % 2**32)
                 for d, s in enumerate(strides)), jnp.zeros(x.shape, jnp.uint32))
    weights = index * jnp.uint32(2654435762) + jnp.uint32(1)  # odd: an even factor, plus one
    return jnp.sum(bits * weights, dtype=jnp.uint32)


def describe_fingerprint(tree: PyTree) -> dict[str, int]:
    """{".params['cls']": checksum, ...} of a tree, as a checkpoint keeps it."""
    checksums = jax.device_get(fingerprint(tree))
    return {jax.tree_util.keystr(path): int(value)
            for path, value in jax.tree.leaves_with_path(checksums)}


class Checkpointer:
    """The checkpoints of one run: the newest `keep` and, with `keep_best`, the most accurate.

    They are in `directory`, an absolute path, one folder per saved step.
    """

    def __init__(self, workdir: str, keep: int, keep_best: bool):
        self.directory = record.checkpoint_directory(workdir)
        policies = [preservation_policy.LatestN(keep)]
        if keep_best:
            policies.append(preservation_policy.BestN(
                get_metric_fn=_accuracy, n=1, keep_checkpoints_without_metrics=False))
        self._manager = ocp.CheckpointManager(self.directory, options=ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            best_fn=_accuracy if keep_best else None, cleanup_tmp_directories=True))

    def save(self, step: int, state: PyTree, metrics: dict[str, float] | None = None) -> None:
        """Starts saving the state after `step`, unless that step has been saved.

        It returns when the state has been copied from the devices. The best checkpoint has the
        highest 'eval/accuracy' in `metrics`.
        """
        if step in self._manager.all_steps():
            return
        saved = self._manager.save(step, metrics=metrics, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave({'fingerprint': describe_fingerprint(state)})), force=True)
        if not saved:
            raise RuntimeError(f'the checkpoint of step {step} was not saved to {self.directory}')

    def restore_latest(self, abstract_state: PyTree) -> PyTree | None:
        """The newest readable state, or None where nothing has been saved.

        `abstract_state` has jax.ShapeDtypeStruct leaves with the shardings to restore to. A
        checkpoint that cannot be read, or whose arrays differ from those that were saved, is
        renamed to bad-STEP once an older one has been read. UserError if there is no older one, or
        if a checkpoint is of another state.
        """
        bad = {}
        for step in consensus.from_main(lambda: sorted(self._manager.all_steps(), reverse=True)):
            state, reason = self._restore(step, abstract_state)
            if reason:
                bad[step] = reason
                continue
            for bad_step, reason in bad.items():
                target = consensus.from_main(lambda step=bad_step: self._set_aside(step))
                log.warning('checkpoint of step %d cannot be used and is now %s: %s', bad_step,
                            target, reason)
            if bad:
                log.warning('falling back to the checkpoint of step %d', step)
                self._manager.reload()
            return state
        if bad:
            reasons = '\n'.join(f'  {step}: {reason}' for step, reason in bad.items())
            raise UserError(f'none of the checkpoints in {self.directory} can be read:\n{reasons}\n'
                            'They were left as they are. To train from the beginning, move that '
                            'directory away or take another --workdir.')
        return None

    def wait(self) -> int | None:
        """The newest step, when everything is on disk; raises the errors of saving."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def close(self) -> None:
        self._manager.close()

    def _restore(self, step, abstract_state):
        """(state, '') or (None, why the files cannot be used): the same on all processes."""
        reason = ''
        try:
            state, saved = self._read(step, abstract_state)
        except (UserError, MemoryError, PermissionError):
            raise  # not the fault of the files
        except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
            if 'RESOURCE_EXHAUSTED' in str(error):
                raise
            reason = _first_line(error)
        # What one process cannot read, none may use. The fingerprint needs all processes.
        reason = next(filter(None, consensus.gather(reason)), '')
        if reason:
            return None, reason
        found = describe_fingerprint(state)
        names = [name for name in found if saved[name] != found[name]]
        if names:
            return None, f'{len(names)} arrays differ from what was saved, first {names[0]}'
        return state, ''

    def _read(self, step, abstract_state):
        """The state of a step, and its fingerprint from when it was saved."""
        # Without the manager, which would wait for the other processes if this one failed.
        folder = epath.Path(self.directory) / str(step)
        saved = _read_fingerprint(folder)
        expected = {jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(abstract_state)}
        if saved.keys() != expected:
            raise UserError(
                f'the checkpoint of step {step} in {self.directory} is of another state. Only in '
                f'the checkpoint: {sorted(saved.keys() - expected) or "nothing"}; only in this '
                f'run: {sorted(expected - saved.keys()) or "nothing"}. It was saved by another '
                'version of the program; continue it with that one.')
        return ocp.StandardCheckpointHandler().restore(
            folder / 'state', args=ocp.args.StandardRestore(abstract_state)), saved

    def _set_aside(self, step):
        path = os.path.join(self.directory, f'bad-{step}')
        names = itertools.chain([path], (f'{path}-{number}' for number in itertools.count(1)))
        target = next(name for name in names if not os.path.exists(name))
        os.rename(os.path.join(self.directory, str(step)), target)
        return target


def load_params(workdir: str, step: int | None = None) -> tuple[PyTree, int]:
    """Parameters of a run as NumPy arrays, averages where it has them, and their step.

    Without `step`, they are from the newest checkpoint that can be read.
    """
    directory = record.checkpoint_directory(workdir)
    steps = [step] if step is not None else sorted(
        (int(name) for name in os.listdir(directory) if name.isdigit()), reverse=True)
    for candidate in steps:
        try:
            return _read_params(epath.Path(directory) / str(candidate)), candidate
        except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
            log.warning('the checkpoint of step %d in %s cannot be read: %s', candidate, workdir,
                        _first_line(error))
    raise UserError(f'{workdir} has no checkpoint that can be read (tried: '
                    f'{", ".join(map(str, steps)) or "there is none"}).')


def _read_params(folder):
    """Reads only the parameters, and compares them with their fingerprint."""
    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(folder / 'state').tree
    name = 'ema_params' if tree.get('ema_params') else 'params'
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), {name: tree[name]})
    params = handler.restore(folder / 'state', args=ocp.args.PyTreeRestore(
        item={name: tree[name]}, restore_args=args, partial_restore=True))[name]
    saved = _read_fingerprint(folder)
    if any(saved[f'.{name}{key}'] != value
           for key, value in describe_fingerprint(params).items()):
        raise ValueError('arrays differ from what was saved')
    return params


def _read_fingerprint(folder):
    return ocp.JsonCheckpointHandler().restore(
        folder / 'meta', args=ocp.args.JsonRestore())['fingerprint']


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
