"""Attention maps, small enough for a page: one picture for all maps of a layer and photo."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from vit_jax.inspection.attention import Observed
from vit_jax.reporting import pictures

MOST = 6_000_000  # numbers in all maps; the pictures take less than half as many bytes
LEVELS = 16  # grey levels


def block_sizes(grid: tuple[int, int], maps: int, class_token: bool) -> tuple[int, int]:
    """Returns the sides of the blocks of patches that share a query and that share a key.

    Both are 1 if all numbers fit into MOST; otherwise first the queries and then the keys get
    blocks of side 2, then of side 4, and so on.

    Args:
      grid: rows and columns of patches.
      maps: number of maps of one query: layers x heads x photos.
      class_token: whether the class token is also a query.
    """

    def num_blocks(side):
        rows, columns = grid
        return -(-rows // side) * -(-columns // side)

    query_side = 1
    key_side = 1
    while maps * (num_blocks(query_side) + int(class_token)) * num_blocks(key_side) > MOST:
        if query_side >= max(grid) and key_side >= max(grid):
            break
        if query_side == key_side:
            query_side *= 2
        else:
            key_side *= 2
    return query_side, key_side


def photo(seen: Observed, sizes: tuple[int, int]) -> dict[str, Any]:
    """Returns the maps of one photo.

    Args:
      seen: attention in a batch of one photo.
      sizes: sides of the blocks of queries and of keys, from `block_sizes`. The weights are
        averaged over the queries of a block and summed over the keys of a block.

    Returns:
      `layers`, a picture for each as `sheet` describes it; `queries` and `keys`, the grids (rows,
      columns); and `class_token`, whether query 0 is the class token and the patches follow.
    """
    query_side, key_side = sizes
    weights = np.asarray(seen.weights)[:, 0]  # [layers, heads, queries, keys]
    # Summed over blocks of keys: [layers, heads, queries, rows, columns].
    of_keys = _pooled(weights[..., seen.prefix :], seen.grid, key_side)
    of_patches = np.moveaxis(of_keys[:, :, seen.prefix :], 2, -1)
    # Averaged over blocks of queries.
    counts = _pooled(np.ones(math.prod(seen.grid)), seen.grid, query_side)  # patches in each block
    means = _pooled(of_patches, seen.grid, query_side) / counts
    means = np.moveaxis(means.reshape(*means.shape[:-2], -1), -1, 2)
    of_class_token = of_keys[:, :, : int(seen.class_token)]
    maps = np.concatenate([of_class_token, means], axis=2)
    return {
        'layers': [pictures.uri(sheet(layer)) for layer in maps],
        'queries': list(counts.shape),
        'keys': list(maps.shape[-2:]),
        'class_token': bool(seen.class_token),
    }


def sheet(maps: Float[np.ndarray, 'heads queries rows columns']) -> np.ndarray:
    """Draws all maps of a layer as one grey picture.

    The map of a query and a head is one tile: the square roots of the weights, scaled so that the
    largest is white, and rounded to LEVELS. The first pixel in the row below a tile is the square
    root of the largest weight, where 255 means one.

    Args:
      maps: attention weights.

    Returns:
      uint8 [queries * (rows + 1), heads * columns].
    """
    heads, queries, rows, columns = maps.shape
    peaks = maps.max(axis=(-2, -1), keepdims=True)
    tiles = np.zeros((heads, queries, rows + 1, columns))
    steps = np.round(np.sqrt(maps / np.maximum(peaks, 1e-12)) * (LEVELS - 1))
    tiles[..., :rows, :] = steps * 255 / (LEVELS - 1)
    tiles[..., rows, 0] = np.sqrt(peaks[..., 0, 0]) * 255
    return (
        np.clip(np.round(tiles), 0, 255)
        .astype(np.uint8)
        .transpose(1, 2, 0, 3)
        .reshape(queries * (rows + 1), heads * columns)
    )


def _pooled(values, grid, size):
    """Sums [..., patches] over square blocks of patches; returns [..., rows, columns]."""
    values = values.reshape(*values.shape[:-1], *grid)
    for axis, length in zip((-2, -1), grid, strict=True):
        values = np.add.reduceat(values, range(0, length, size), axis=axis)
    return values
