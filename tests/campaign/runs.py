"""The training run of the kinds `kills`, `workdirs` and `limits`, and comparisons of runs."""

import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.campaign import configs
from tests.campaign.cases import Failure
from tests.support.runs import RANDOM, TIMED, arguments

# Steps of a full run and of a half-done one; both end with an evaluation and a checkpoint.
STEPS = 12
HALF = 8
FIELDS = RANDOM | {
    'num_steps': STEPS,
    'eval_every': 4,
    'checkpoint_every': 2,
    'keep_checkpoints': 3,
    'keep_best': True,
}


def train_here(workdir, steps=STEPS):
    """Starts or resumes the run in this process; returns its log lines, None if refused."""
    from vit_jax import main

    word, lines = configs.command(
        main.main, [*arguments(workdir, fields=FIELDS | {'num_steps': steps}), '--num_processes=1']
    )
    return lines if word == 'done' else None


def final_state(workdir, step=STEPS):
    path = pathlib.Path(workdir).resolve() / 'checkpoints' / str(step) / 'state'
    with ocp.PyTreeCheckpointer() as checkpointer:
        # NumPy arrays, because another number of processes may have saved them.
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
    state = final_state(workdir)
    expected_state = final_state(expected)
    if len(state) != len(expected_state):
        raise Failure('unequal', 'other arrays')
    for (path, leaf), (_, expected_leaf) in zip(state, expected_state, strict=True):
        x = np.asarray(leaf)
        y = np.asarray(expected_leaf)
        if x.dtype != y.dtype or x.tobytes() != y.tobytes():
            raise Failure('unequal', f'bits of {jax.tree_util.keystr(path)}')
    if rows_too and rows(workdir) != rows(expected):
        raise Failure('unequal', 'rows of metrics.jsonl')
