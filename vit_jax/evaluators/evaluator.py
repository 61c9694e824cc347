"""The two types of evaluators, and sums over all batches of a split."""

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

    Its caller jits `sums`, pads and masks the last batch, adds the sums of batches, devices and
    processes, and passes the totals to `finish`.

    Attributes:
      sums: a pure function (params, batch) -> sums over the examples whose `mask` is set. Other
        examples may be NaN: use jnp.where, not a product with the mask. Arrays in `rows` have an
        element for each example; they are concatenated and need an array `mask` among them.
      finish: a function (totals in float64) -> the metrics by name.
      metrics: the descriptions of the metrics that `finish` returns.
    """

    sums: Callable[[PyTree, Batch], Sums]
    finish: Callable[[Sums], dict[str, float]]
    metrics: Sequence[Metric]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """An evaluator of any kind.

    Attributes:
      metrics: the descriptions of the metrics that `run` returns.
      run: a function (params, interrupted) -> the metrics by name. It calls `interrupted` before
        every batch and stops with the result None if `interrupted` returns True. All processes call
        `run` and get the same result.
    """

    metrics: Sequence[Metric]
    run: Callable[[PyTree, Callable[[], bool]], dict[str, float] | None]


def never() -> bool:
    """Returns False, for evaluations that nothing interrupts."""
    return False


def sums_in_parts(
    params: PyTree, batch: Batch, *, sums: Callable[[PyTree, Batch], Sums], accum_steps: int = 1
) -> Sums:
    """The sums of a SumEvaluator over a batch; a pure function, which the caller jits.

    Args:
      params: the parameters that are scored.
      batch: a batches.Batch with labels and `mask`.
      sums: the function `sums` of the evaluator.
      accum_steps: number of equal parts of the batch, which are computed one after the other to fit
        in memory, as in training.
    """
    if accum_steps == 1:
        return sums(params, batch)
    part_sums = jax.lax.map(functools.partial(sums, params), split(batch, accum_steps))
    rows = {}
    if 'rows' in part_sums:
        rows = {'rows': join(part_sums.pop('rows'))}
    return jax.tree.map(lambda x: x.sum(axis=0), part_sums) | rows


def total(
    step: Callable[[PyTree, Batch], Sums],
    params: PyTree,
    batches: Iterable,
    interrupted: Callable[[], bool] = never,
) -> Sums | None:
    """Sums over all batches, in float64, which is exact for counts.

    Args:
      step: (params, batch) -> sums, such as `sums_in_parts`.
      params: the parameters that are scored.
      batches: on the devices, with mask 0 for padding and broken images.
      interrupted: called before every batch; if it returns True, the result is None.

    Returns:
      The totals by name. Arrays in `rows` are concatenated, without elements whose `mask` is 0.
    """
    sums = []
    rows = []
    for batch in batches:
        if interrupted():
            return None
        batch_sums = step(params, batch)
        rows.append(batch_sums.pop('rows', {}))
        sums.append(batch_sums)
        jax.block_until_ready(sums[-2:-1])  # at most two batches wait on the devices
        rows[-2:-1] = map(_valid, rows[-2:-1])
    rows[-1:] = map(_valid, rows[-1:])
    totals: Sums = {}
    for name in sums[0]:
        totals[name] = sum(np.asarray(s[name], np.float64) for s in sums)
    if rows[0]:
        totals['rows'] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return totals


def _valid(rows):
    """Copies the rows to the host, without rows whose `mask` is 0."""
    rows = jax.device_get(rows)
    return {name: x[rows['mask'] > 0] for name, x in rows.items() if name != 'mask'}
