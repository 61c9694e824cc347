"""The parameters of a run that has saved checkpoints, for those who use them without training."""

import logging
import os
from collections.abc import Iterable

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jaxtyping import PyTree

from vit_jax import config as config_lib
from vit_jax.errors import UserError, some
from vit_jax.workdir import checkpoint, descriptions, fingerprint, metrics, record, storage_errors

log = logging.getLogger(__name__)


def load_params(workdir: str, step: int | None = None) -> tuple[PyTree, int]:
    """Parameters of a run as NumPy arrays, averages where it has them, and their step.

    Without `step`, they are from the best checkpoint where the run keeps it (`keep_best`), else
    from the newest that can be read. The run may be training, and remove checkpoints that have been
    listed: when none of a listing can be read, the checkpoints are listed again.

    Raises UserError if none can be read, if the folder of the one that is used has the name of
    another step, or if it was saved with other fields of the model or of its images than
    config.json has.
    """
    config = record.read(workdir)[0]
    directory = record.checkpoint_directory(workdir)
    tried = set()
    while True:
        saved = record.saved_steps(directory)
        steps, best = _in_order(workdir, saved, step)
        candidates = [candidate for candidate in steps if candidate not in tried]
        if not candidates:
            break
        for candidate in candidates:
            tried.add(candidate)
            if best and candidate == best[0]:
                log.info(
                    'the best checkpoint is taken, of step %d (%s). Another one: %s/STEP',
                    *best,
                    directory,
                )
            folder = epath.Path(directory) / str(candidate)
            try:
                params, saved_fields = _read_params(folder)
            except checkpoint.OtherStepError as error:
                raise UserError(f'{error} Nothing was read.') from error
            except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
                what = f'the checkpoint of step {candidate} in {workdir}'
                storage_errors.require_not_scarce(error, what)
                if folder.is_dir():
                    log.warning('%s cannot be read: %s', what, checkpoint.first_line(error))
                else:  # by the run, which has newer ones: the next listing shows them
                    log.info('%s has been removed while it was read', what)
                continue
            _require_same_fields(config, saved_fields, workdir, candidate)
            return params, candidate
    wanted = 'checkpoint' if step is None else f'checkpoint of step {step}'
    raise UserError(
        f'{workdir} has no {wanted} that can be read (there are: '
        f'{", ".join(map(str, sorted(saved))) or "none"}).'
    )


def _in_order(workdir, saved, step):
    """The steps to try, the preferred one first, and what `kept_best` returns for them."""
    if step is not None:
        return ([step] if step in saved else []), None
    steps = sorted(saved, reverse=True)
    best = kept_best(workdir, steps)
    if best:
        steps.sort(key=lambda step: step == best[0], reverse=True)
    return steps, best


def kept_best(workdir: str, steps: Iterable[int]) -> tuple[int, str] | None:
    """The best of the steps of a run and what it reached; None where none is kept or known."""
    config = record.read(workdir)[0]
    if not config.get('keep_best'):
        return None
    name = config.get('best_metric', metrics.ACCURACY)
    try:
        scores = metrics.scores(metrics.read(workdir), name)
    except UserError as error:
        log.warning('the best checkpoint is not known: %s', error)
        return None
    metric = descriptions.of_names(workdir, [name], config)[name]
    best = metrics.best(scores, steps, metric)
    return None if best is None else (best, f'{name} {scores[best]:.4f}')


def _require_same_fields(config, saved_fields, workdir, step):
    """Raises UserError if config.json differs from the fields with which a checkpoint was saved."""
    recorded = config_lib.of_weights(config)
    lines = [
        f'{name}: {recorded.get(name, "absent")!r} in the file, {value!r} in the checkpoint'
        for name, value in saved_fields.items()
        if recorded.get(name, 'absent') != value
    ]
    if lines:
        raise UserError(
            f'{os.path.join(workdir, record.CONFIG)} describes another model, or other images, '
            f'than the checkpoint of step {step} was saved with. Restore the file:\n  '
            + some(lines, 10, '\n  ')
        )


def _read_params(folder):
    """(parameters, the fields that were saved beside them), each compared with its checksum."""
    meta = checkpoint.read_meta(folder)
    checkpoint.check_step(meta, folder)
    saved = meta['fingerprint']
    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(folder / 'state').tree
    name = 'ema_params' if tree.get('ema_params') else 'params'
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), {name: tree[name]})
    params = handler.restore(
        folder / 'state',
        args=ocp.args.PyTreeRestore(
            item={name: tree[name]}, restore_args=args, partial_restore=True
        ),
    )[name]
    if any(saved[f'.{name}{key}'] != value for key, value in fingerprint.describe(params).items()):
        raise ValueError('arrays differ from what was saved')
    return params, checkpoint.extra_of(meta).get(checkpoint.FIELDS, {})
