"""Frozen features: a named representation of every image of a split."""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import flax.linen as nn
import numpy as np
from jaxtyping import Float, Int, PyTree

from vit_jax.errors import UserError
from vit_jax.evaluators import evaluator
from vit_jax.evaluators.batches import Batch
from vit_jax.models import representation
from vit_jax.parallel.microbatch import in_parts


class Features(NamedTuple):
    """The representations of a split's images and their labels."""

    values: Float[np.ndarray, 'images features']
    labels: Int[np.ndarray, ' images']


def step(
    params: PyTree, batch: Batch, *, model: nn.Module, name: str, accum_steps: int = 1
) -> dict[str, Batch]:
    """The features of a batch. This is a pure function; the caller jits it with replicated results.

    Args:
      params: the parameters of the model.
      batch: a batches.Batch.
      model: the encoder.
      name: the name of the representation.
      accum_steps: number of equal parts of the batch, see evaluator.sums_in_parts.

    Returns:
      `rows` with features [batch, features], label and mask.
    """
    features = in_parts(
        functools.partial(representation.of, model, params, name=name), batch['image'], accum_steps
    )
    return {'rows': {'features': features, 'label': batch['label'], 'mask': batch['mask']}}


def extract(
    features_step: Callable,
    params: PyTree,
    batches: Iterable,
    interrupted: Callable[[], bool] = evaluator.never,
) -> Features | None:
    """The features of all images of `batches`, in order, without broken images.

    Args:
      features_step: `step` with its keyword arguments bound, jitted.
      params: the parameters of the model.
      batches: on the devices, with mask 0 for padding and broken images.
      interrupted: called before every batch; if it returns True, the result is None.

    Raises:
      UserError: if a feature is not finite.
    """
    totals = evaluator.total(features_step, params, batches, interrupted)
    if totals is None:
        return None
    features = Features(totals['rows']['features'], totals['rows']['label'])
    finite = np.isfinite(features.values).all(axis=1)
    if not finite.all():
        raise UserError(
            f'the features of {np.sum(~finite)} of {len(finite)} images are not '
            'finite: the training diverged, or the weights are damaged.',
            kind='content',
        )
    return features
