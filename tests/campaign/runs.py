"""The training run that kills, damaged workdirs and limits are about, and how runs are compared."""

import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.campaign import configs
from tests.campaign.cases import Failure
from tests.support.runs import RANDOM, TIMED, arguments

STEPS, HALF = 12, 8  # both with an evaluation and a checkpoint at their end
FIELDS = RANDOM | {
    'num_steps': STEPS,
    'eval_every': 4,
    'checkpoint_every': 2,
    'keep_checkpoints': 3,
    'keep_best': True,
}


def train_here(workdir, steps=STEPS):
    """The run in this process, begun or continued: its log lines, None if it was refused."""
    from vit_jax import main

    word, lines = configs.command(
        main.main, [*arguments(workdir, fields=FIELDS | {'num_steps': steps}), '--num_processes=1']
    )
    return lines if word == 'done' else None


def final_state(workdir, step=STEPS):
    path = pathlib.Path(workdir).resolve() / 'checkpoints' / str(step) / 'state'
    with ocp.PyTreeCheckpointer() as checkpointer:
        # As arrays of this process, whatever number of processes they were saved from.
        arrays = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
            checkpointer.metadata(path).item_metadata.tree,
        )
        return jax.tree.leaves_with_path(checkpointer.restore(path, restore_args=arrays))


def rows(workdir):
    from vit_jax.workdir import metrics

    return [{k: v for k, v in row.items() if k not in TIMED} for row in metrics.read(workdir)]


def require_equal(workdir, expected, rows_too=True):
    """Raises Failure unless two complete runs have the same bits and the same metrics."""
    a, b = final_state(workdir), final_state(expected)
    if len(a) != len(b):
        raise Failure('unequal', 'other arrays')
    for (path, x), (_, y) in zip(a, b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype != y.dtype or x.tobytes() != y.tobytes():
            raise Failure('unequal', f'bits of {jax.tree_util.keystr(path)}')
    if rows_too and rows(workdir) != rows(expected):
        raise Failure('unequal', 'rows of metrics.jsonl')
