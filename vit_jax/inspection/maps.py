"""Maps of attention on the grid of patches of an image."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from vit_jax.inspection import attention
from vit_jax.inspection.attention import Observed


def rolled_out(
    weights: Float[Array, 'layers batch heads tokens tokens'],
) -> Float[Array, 'batch tokens tokens']:
    """Returns the attention rollout: the share of each input token in each output token.

    Rollout is the product of one matrix per layer: half the mean of the weights over the heads,
    plus half the identity for the residual connection (appendix D.8; arXiv 2005.00928, section 3).
    Rows sum to one.
    """
    mixing = (weights.mean(axis=2) + jnp.eye(weights.shape[-1])) / 2
    return functools.reduce(
        lambda before, layer: jnp.matmul(layer, before, precision='highest'), mixing
    )


def rollout(observed: Observed) -> Float[Array, 'batch rows columns']:
    """Returns the share of each patch in the input of the head, by rollout (figures 6 and 14)."""
    shares = jnp.einsum(
        'bq,bqk->bk', attention.readout(observed), rolled_out(observed.weights), precision='highest'
    )
    return on_grid(shares, observed)


def of_query(
    observed: Observed, query: tuple[int, int] | None = None
) -> Float[Array, 'layers batch heads rows columns']:
    """Returns the attention of one query to each patch.

    Args:
      observed: the attention weights.
      query: (row, column) of a patch; None: the class token or, without one, the mean over the
        tokens that the head reads.
    """
    if query is None:
        weights = jnp.einsum(
            'lbhqk,bq->lbhk', observed.weights, attention.readout(observed), precision='highest'
        )
    else:
        row, column = query
        token = row * observed.grid[1] + column + observed.prefix
        weights = observed.weights[..., token, :]
    return on_grid(weights, observed)


def of_head(observed: Observed) -> Float[Array, 'batch heads rows columns']:
    """Returns the attention that the head of the model reads.

    This is the attention of the pooling, or the last layer of of_query(observed).
    """
    if observed.pooling is not None:
        return on_grid(observed.pooling, observed)
    return of_query(observed)[-1]


def most_of_mass(
    maps: Float[Array | np.ndarray, '... rows columns'], share: float = 0.6
) -> Bool[np.ndarray, '... rows columns']:
    """Selects the fewest patches with at least `share` of a map's sum (DINO, arXiv 2104.14294)."""
    flat = np.asarray(maps, np.float64).reshape(*maps.shape[:-2], -1)
    order = flat.argsort(axis=-1)
    mass = np.take_along_axis(flat, order, -1).cumsum(axis=-1)
    kept = np.empty(flat.shape, bool)
    np.put_along_axis(kept, order, mass > (1 - share) * mass[..., -1:], -1)
    return kept.reshape(maps.shape)


def distances(observed: Observed, patch: tuple[int, int]) -> Float[Array, 'layers batch heads']:
    """Returns the mean attention distance in pixels (figures 7 and 11).

    The mean is over all patches as queries. For each query, the distances to the patches are
    weighted by the attention to them. Attention to a class token or registers does not count.

    Args:
      observed: the attention weights.
      patch: (height, width) in pixels of a patch; in a hybrid, times the stride of the ResNet.
    """
    first = observed.prefix
    weights = observed.weights[..., first:, first:]
    sums = jnp.maximum(weights.sum(axis=-1), 1e-30)  # zero if all attention is to other tokens
    weighted = (weights * between_patches(observed.grid, patch)).sum(axis=-1)
    return (weighted / sums).mean(axis=-1)


def between_patches(
    grid: tuple[int, int], patch: tuple[int, int]
) -> Float[np.ndarray, 'patches patches']:
    """Returns the distances between the centres of patches in pixels.

    Their mean is the attention distance of uniform attention.
    """
    centres = np.moveaxis(np.indices(grid), 0, -1).reshape(-1, 2) * patch
    return np.linalg.norm(centres[:, None] - centres, axis=-1)


def on_grid(
    values: Float[Array, '... tokens'], observed: Observed
) -> Float[Array, '... rows columns']:
    """Arranges the values of the patches on the grid, without the values of other tokens."""
    patches = values[..., observed.prefix :]
    return patches.reshape(*patches.shape[:-1], *observed.grid)
