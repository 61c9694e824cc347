"""What attention weights show of images, on the grid of patches."""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from vit_jax.inspection import attention
from vit_jax.inspection.attention import Observed


def rolled_out(
    weights: Float[Array, 'layers batch heads tokens tokens'],
) -> Float[Array, 'batch tokens tokens']:
    """Attention rollout: how much of each patch of the image is in each token after all layers.

    Of every layer it takes the mean over the heads, and half of each token from the residual
    connection, and multiplies them (appendix D.8; arXiv 2005.00928, section 3). Rows sum to one.
    """
    mixing = (weights.mean(axis=2) + jnp.eye(weights.shape[-1])) / 2
    return functools.reduce(
        lambda before, layer: jnp.matmul(layer, before, precision='highest'), mixing
    )


def rollout(observed: Observed) -> Float[Array, 'batch rows columns']:
    """The share of each patch in what the head reads, by attention rollout (figures 6 and 14)."""
    found = jnp.einsum(
        'bq,bqk->bk', attention.readout(observed), rolled_out(observed.weights), precision='highest'
    )
    return on_grid(found, observed)


def of_query(
    observed: Observed, query: tuple[int, int] | None = None
) -> Float[Array, 'layers batch heads rows columns']:
    """What a patch (row, column) attends to.

    None is for the class token or, without one, the mean over tokens as the head reads them.
    """
    if query is None:
        found = jnp.einsum(
            'lbhqk,bq->lbhk', observed.weights, attention.readout(observed), precision='highest'
        )
    else:
        token = query[0] * observed.grid[1] + query[1] + observed.prefix
        found = observed.weights[..., token, :]
    return on_grid(found, observed)


def of_head(observed: Observed) -> Float[Array, 'batch heads rows columns']:
    """What the head reads: the attention of pooling, or in the last layer as of_query(None)."""
    if observed.pooling is not None:
        return on_grid(observed.pooling, observed)
    return of_query(observed)[-1]


def most_of_mass(
    maps: Float[Array | np.ndarray, '... rows columns'], share: float = 0.6
) -> Bool[np.ndarray, '... rows columns']:
    """The fewest patches that have at least `share` of a map's sum (DINO, arXiv 2104.14294)."""
    flat = np.asarray(maps, np.float64).reshape(*maps.shape[:-2], -1)
    order = flat.argsort(axis=-1)
    mass = np.take_along_axis(flat, order, -1).cumsum(axis=-1)
    kept = np.empty(flat.shape, bool)
    np.put_along_axis(kept, order, mass > (1 - share) * mass[..., -1:], -1)
    return kept.reshape(maps.shape)


def distances(observed: Observed, patch: tuple[int, int]) -> Float[Array, 'layers batch heads']:
    """Mean distance in pixels from a patch to those it attends to (figures 7 and 11).

    It is weighted by the attention to patches, without that to a class token or registers, and
    averaged over all patches as queries. `patch` is (height, width) of one in pixels, of a hybrid
    with the stride of its ResNet.
    """
    first = observed.prefix
    weights = observed.weights[..., first:, first:]
    among = jnp.maximum(weights.sum(axis=-1), 1e-30)  # all of it may be of others
    return ((weights * between_patches(observed.grid, patch)).sum(axis=-1) / among).mean(axis=-1)


def between_patches(
    grid: tuple[int, int], patch: tuple[int, int]
) -> Float[np.ndarray, 'patches patches']:
    """Distances of the centres of patches in pixels; their mean is that of uniform attention."""
    centres = np.moveaxis(np.indices(grid), 0, -1).reshape(-1, 2) * patch
    return np.linalg.norm(centres[:, None] - centres, axis=-1)


def on_grid(
    values: Float[Array, '... tokens'], observed: Observed
) -> Float[Array, '... rows columns']:
    """Values of tokens as values of patches; those of other tokens are left out."""
    patches = values[..., observed.prefix :]
    return patches.reshape(*patches.shape[:-1], *observed.grid)
