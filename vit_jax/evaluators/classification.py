"""Top-1 and top-5 accuracy and loss, every example counted exactly once."""

from collections.abc import Callable, Iterable

import jax
from jaxtyping import PyTree


def evaluate(eval_step: Callable, params: PyTree, batches: Iterable,
             interrupted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
    """Evaluates on all batches.

    Args:
      eval_step: (params, batch) -> sums, see steps.eval_step.
      batches: device batches; padding and broken images have mask 0.
      interrupted: asked before every batch.

    Returns:
      eval/accuracy and eval/accuracy_top5 in [0, 1], eval/loss in nats, eval/num_examples;
      None when interrupted.
    """
    sums = []
    for batch in batches:
        if interrupted():
            return None
        sums.append(eval_step(params, batch))
        jax.block_until_ready(sums[-2:-1])  # no more than two batches wait on the devices
    # In float64, exact for counts.
    total = {name: sum(float(s[name]) for s in sums)
             for name in ('count', 'correct', 'correct_top5', 'loss')}
    return {'eval/accuracy': total['correct'] / total['count'],
            'eval/accuracy_top5': total['correct_top5'] / total['count'],
            'eval/loss': total['loss'] / total['count'],
            'eval/num_examples': total['count']}
