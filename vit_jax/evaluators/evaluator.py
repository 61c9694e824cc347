"""The types of evaluators, and sums over all batches of a split."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from vit_jax.evaluators.batches import Batch
from vit_jax.evaluators.metric import Metric
from vit_jax.parallel.microbatch import join, split

Sums = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SumEvaluator:
    """An evaluator whose metrics follow from sums over the examples of a split.

    Its caller jits `sums`, pads and masks the last batch, adds up the sums of batches, devices and
    processes, and gives the totals to `finish`.

    Attributes:
      sums: (params, batch) -> arrays that are added up, of the examples whose `mask` is set; pure.
        Others may be NaN: choose by jnp.where, do not multiply. Arrays in `rows`, which have an
        element for each example and among which `mask` is, are joined and not added up.
      finish: the totals, in float64 -> the metrics by name.
      metrics: the descriptions of what `finish` returns.
    """

    sums: Callable[[PyTree, Batch], Sums]
    finish: Callable[[Sums], dict[str, float]]
    metrics: Sequence[Metric]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """An evaluator of any kind.

    Attributes:
      metrics: the descriptions of what `run` returns.
      run: (params, interrupted) -> the metrics by name, None if `interrupted()`, which is asked
        before every batch. All processes of a run call it and return the same.
    """

    metrics: Sequence[Metric]
    run: Callable[[PyTree, Callable[[], bool]], dict[str, float] | None]


def never() -> bool:
    """The answer where nothing interrupts an evaluation."""
    return False


def sums_in_parts(
    params: PyTree, batch: Batch, *, sums: Callable[[PyTree, Batch], Sums], accum_steps: int = 1
) -> Sums:
    """The sums of a SumEvaluator over a batch; pure, to be jitted by the caller.

    Args:
      batch: with labels and `mask`, see batches.Batch.
      sums: of the evaluator.
      accum_steps: the batch is split into this many equal parts, which are computed one after the
        other, as in training, to fit in memory.
    """
    if accum_steps == 1:
        return sums(params, batch)
    found = jax.lax.map(functools.partial(sums, params), split(batch, accum_steps))
    rows = {}
    if 'rows' in found:
        rows = {'rows': join(found.pop('rows'))}
    return jax.tree.map(lambda x: x.sum(axis=0), found) | rows


def total(
    step: Callable[[PyTree, Batch], Sums],
    params: PyTree,
    batches: Iterable,
    interrupted: Callable[[], bool] = never,
) -> Sums | None:
    """Sums over all batches, in float64, which is exact for counts.

    Args:
      step: (params, batch) -> sums, as of `sums_in_parts`.
      batches: on the devices, with mask 0 for padding and broken images.
      interrupted: asked before every batch; if it says so, None is returned.

    Arrays in `rows` are not added up but joined, without the elements whose `mask` is 0.
    """
    sums = []
    rows = []
    for batch in batches:
        if interrupted():
            return None
        of_batch = step(params, batch)
        rows.append(of_batch.pop('rows', {}))
        sums.append(of_batch)
        jax.block_until_ready(sums[-2:-1])  # no more than two batches wait on the devices
        rows[-2:-1] = map(_valid, rows[-2:-1])
    rows[-1:] = map(_valid, rows[-1:])
    totals: Sums = {}
    for name in sums[0]:
        totals[name] = sum(np.asarray(s[name], np.float64) for s in sums)
    if rows[0]:
        totals['rows'] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return totals


def _valid(rows):
    """On the host, without those that the mask leaves out."""
    rows = jax.device_get(rows)
    return {name: x[rows['mask'] > 0] for name, x in rows.items() if name != 'mask'}
