"""Top-1 and top-5 accuracy and loss, every example counted exactly once."""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from jaxtyping import PyTree


def evaluate(eval_step: Callable, params: PyTree, batches: Iterable,
             interrupted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """Evaluates on all batches; see total() and metrics(). None when interrupted."""
    sums = total(eval_step, params, batches, interrupted)
    return sums and metrics(sums)


def total(eval_step: Callable, params: PyTree, batches: Iterable,
          interrupted: Callable[[], bool] = lambda: False) -> dict[str, np.ndarray] | None:
    """Sums over all batches, in float64, which is exact for counts.

    Args:
      eval_step: (params, batch) -> sums, see steps.eval_step.
      batches: device batches; padding and broken images have mask 0.
      interrupted: asked before every batch; None is returned then.
    """
    sums = []
    for batch in batches:
        if interrupted():
            return None
        sums.append(eval_step(params, batch))
        jax.block_until_ready(sums[-2:-1])  # no more than two batches wait on the devices
    return {name: sum(np.asarray(s[name], np.float64) for s in sums) for name in sums[0]}


def metrics(sums: dict[str, np.ndarray]) -> dict[str, float]:
    """eval/accuracy and eval/accuracy_top5 in [0, 1], eval/loss in nats, eval/num_examples."""
    count = float(sums['count'])
    return {'eval/accuracy': float(sums['correct']) / count,
            'eval/accuracy_top5': float(sums['correct_top5']) / count,
            'eval/loss': float(sums['loss']) / count,
            'eval/num_examples': count}
