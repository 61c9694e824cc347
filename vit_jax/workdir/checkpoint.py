"""Saves and restores the training state with Orbax, and proves that what comes back is what went.

A checkpoint holds the state and a fingerprint of it: one 32-bit checksum per array, computed on
the devices. Orbax notices a missing file but not a flipped bit; the fingerprint notices both.
"""

import logging
import math
import os

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import Array, PyTree, UInt32
from orbax.checkpoint.checkpoint_managers import preservation_policy

from vit_jax.errors import UserError
from vit_jax.processes import hosts

log = logging.getLogger(__name__)


@jax.jit
def fingerprint(tree: PyTree) -> PyTree:
    """One checksum per array of the tree: sum of its bits times odd weights, modulo 2**32.

    Integer sums do not depend on their order, so it is the same on any mesh. A flipped bit always
    changes it: it adds a power of two times an odd number. Arrays: float or int, 16 or 32 bits.
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
    """{'.params['cls']': checksum, ...} of a tree, as a checkpoint keeps it."""
    checksums = jax.device_get(fingerprint(tree))
    return {jax.tree_util.keystr(path): int(value)
            for path, value in jax.tree.leaves_with_path(checksums)}


class Checkpointer:
    """The checkpoints of one run: the newest `keep`, and the best when asked for.

    Saving is asynchronous: `save` returns when the state has been copied off the devices.

    Attributes:
      directory: absolute path, one folder per saved step.
    """

    def __init__(self, directory: str, keep: int, keep_best: bool):
        """Opens, or makes, the directory that holds one folder per saved step."""
        self.directory = os.path.abspath(directory)
        policies = [preservation_policy.LatestN(keep)]
        if keep_best:
            policies.append(preservation_policy.BestN(
                get_metric_fn=_accuracy, n=1, keep_checkpoints_without_metrics=False))
        self._manager = ocp.CheckpointManager(self.directory, options=ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
            best_fn=_accuracy if keep_best else None, cleanup_tmp_directories=True))

    def save(self, step: int, state: PyTree, metrics: dict[str, float] | None = None) -> None:
        """Starts saving the state after `step`; a step that is there already stays as it is.

        Args:
          metrics: what was evaluated at this step, with 'eval/accuracy'; decides the best.
        """
        if step in self._manager.all_steps():
            return
        saved = self._manager.save(step, metrics=metrics, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave({'fingerprint': describe_fingerprint(state)})), force=True)
        if not saved:
            raise RuntimeError(f'the checkpoint of step {step} was not saved to {self.directory}')

    def restore_latest(self, abstract_state: PyTree) -> PyTree | None:
        """The newest readable state, None when nothing was saved yet.

        A checkpoint that cannot be read, or whose arrays are not those that were saved, is renamed
        to bad-STEP once the one before it has been read.

        Args:
          abstract_state: jax.ShapeDtypeStruct leaves with the shardings to restore to.

        Raises:
          UserError: checkpoints are there and none can be read, or they are of another state.
        """
        bad = {}
        for step in hosts.from_main(lambda: sorted(self._manager.all_steps(), reverse=True)):
            state, reason = self._restore(step, abstract_state)
            if reason:
                bad[step] = reason
                continue
            for bad_step, reason in bad.items():
                log.warning('checkpoint of step %d cannot be used and is now %s: %s', bad_step,
                            hosts.from_main(lambda step=bad_step: self._set_aside(step)), reason)
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

    def latest_step(self) -> int | None:
        """The newest step saved, None when there is none."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Returns when everything is on disk; raises what went wrong while saving."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then lets go of the directory."""
        self._manager.close()

    def _restore(self, step, abstract_state):
        """(state, '') or (None, why the files cannot be used): the same on all processes."""
        state, saved, reason = None, None, ''
        try:
            state, saved = self._read(step, abstract_state)
        except (UserError, MemoryError, PermissionError):
            raise  # the files are not to blame
        except Exception as error:  # Orbax and TensorStore raise all kinds for a broken file
            if 'RESOURCE_EXHAUSTED' in str(error):
                raise
            reason = _first_line(error)
        # What one process cannot read, none may use; and only together can they compute.
        reason = hosts.agree(reason, lambda reasons: next(filter(None, reasons), ''))
        if reason:
            return None, reason
        found = describe_fingerprint(state)
        names = [n for n in saved | found if saved.get(n) != found.get(n)]
        if names:
            return None, f'{len(names)} arrays differ from what was saved, first {names[0]}'
        return state, ''

    def _read(self, step, abstract_state):
        """The state of a step, and its fingerprint when it was saved."""
        # Past the manager, which would wait for the other processes where this one fails.
        folder = epath.Path(self.directory) / str(step)
        saved = ocp.JsonCheckpointHandler().restore(
            folder / 'meta', args=ocp.args.JsonRestore())['fingerprint']
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
        source = os.path.join(self.directory, str(step))
        target = os.path.join(self.directory, f'bad-{step}')
        for n in range(1, 1000):
            if not os.path.exists(target):
                break
            target = os.path.join(self.directory, f'bad-{step}-{n}')
        os.rename(source, target)
        return target


def _accuracy(metrics: dict[str, float]) -> float:
    return metrics['eval/accuracy']


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
