"""Loads the parameters of a run from its checkpoints, without training."""

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
    """Loads the parameters of a run, or their moving average if the run has one.

    The run may still be training and remove checkpoints. If none of the listed checkpoints can be
    read, they are listed again.

    Args:
      workdir: the directory of the run.
      step: the step of the checkpoint. By default it is the best checkpoint if the run keeps it
        (`keep_best`), otherwise the newest one that can be read.

    Returns:
      The parameters as NumPy arrays, and their step.

    Raises:
      UserError: no checkpoint can be read, the folder of the checkpoint has the name of another
        step, or config.json describes another model or other images than the checkpoint.
    """
    config = record.read(workdir)[0]
    directory = record.checkpoint_directory(workdir)
    tried: set[int] = set()
    while True:
        saved = record.saved_steps(directory)
        steps, best = _in_order(workdir, saved, step)
        candidates = [candidate for candidate in steps if candidate not in tried]
        if not candidates:
            raise _no_checkpoint(workdir, saved, step, tried)
        for candidate in candidates:
            tried.add(candidate)
            if best and candidate == best[0]:
                log.info(
                    'using the best checkpoint, of step %d (%s). Another one: %s/STEP',
                    *best,
                    directory,
                )
            checkpoint_contents = _read_or_warn(workdir, directory, candidate)
            if checkpoint_contents is None:
                continue
            params, saved_fields = checkpoint_contents
            _require_same_fields(config, saved_fields, workdir, candidate)
            return params, candidate


def _read_or_warn(workdir, directory, step):
    """The result of _read_params for the checkpoint of a step, or None if it cannot be read."""
    folder = epath.Path(directory) / str(step)
    try:
        return _read_params(folder)
    except checkpoint.OtherStepError as error:
        raise UserError(
            f'{error} Nothing was read.', kind='content', file=str(folder), value=step
        ) from error
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
        name = f'the checkpoint of step {step} in {workdir}'
        storage_errors.require_not_scarce(error, name)
        if folder.is_dir():
            log.warning('%s cannot be read: %s', name, checkpoint.first_line(error))
        else:  # the run has newer checkpoints, which the next listing shows
            log.info('the run has removed %s while it was read', name)
        return None


def _no_checkpoint(workdir, saved, step, tried):
    """Makes the error that reports that no checkpoint can be read."""
    name = 'checkpoint' if step is None else f'checkpoint of step {step}'
    existing = ', '.join(map(str, sorted(saved))) or 'none'
    return UserError(
        f'{workdir} has no {name} that can be read (there are: {existing}).',
        kind='unreadable' if tried else 'missing',
        file=workdir,
        value=step,
    )


def _in_order(workdir, saved, step):
    """The steps to try, the preferred one first, and the result of `kept_best` for them."""
    if step is not None:
        return ([step] if step in saved else []), None
    steps = sorted(saved, reverse=True)
    best = kept_best(workdir, steps)
    if best:
        steps.sort(key=lambda step: step == best[0], reverse=True)
    return steps, best


def kept_best(workdir: str, steps: Iterable[int]) -> tuple[int, str] | None:
    """The best of the steps of a run, for example (48, 'eval/accuracy 0.9861').

    Returns None if the run does not keep the best checkpoint or no score is known.
    """
    config = record.read(workdir)[0]
    if not config.get('keep_best'):
        return None
    name = config.get('best_metric', metrics.ACCURACY)
    try:
        scores = metrics.scores(metrics.read(workdir), name)
    except UserError as error:
        log.warning('the best checkpoint is unknown: %s', error)
        return None
    metric = descriptions.of_names(workdir, [name], config)[name]
    best = metrics.best(scores, steps, metric)
    if best is None:
        return None
    return best, f'{name} {scores[best]:.4f}'


def _require_same_fields(config, saved_fields, workdir, step):
    """Raises UserError if config.json differs from the fields in the checkpoint."""
    recorded = config_lib.of_weights(config)
    lines = [
        f'{name}: {recorded.get(name, "absent")!r} in the file, {value!r} in the checkpoint'
        for name, value in saved_fields.items()
        if recorded.get(name, 'absent') != value
    ]
    if lines:
        path = os.path.join(workdir, record.CONFIG)
        raise UserError(
            f'{path} describes another model, or other images, '
            f'than the checkpoint of step {step}. Restore the file:\n  ' + some(lines, 10, '\n  '),
            kind='conflict',
            file=path,
            value=lines,
        )


def _read_params(folder):
    """(parameters, saved fields) of a checkpoint, verified by their checksums."""
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
    for key, checksum in fingerprint.describe(params).items():
        if saved[f'.{name}{key}'] != checksum:
            raise ValueError('arrays differ from the saved ones')
    return params, checkpoint.extra_of(meta).get(checkpoint.FIELDS, {})
