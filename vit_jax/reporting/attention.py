"""What the heads look at, small enough for a page: one picture of all maps of a layer and photo."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from vit_jax.inspection.attention import Observed
from vit_jax.reporting import pictures

MOST = 6_000_000  # numbers of all maps together: their pictures take less than half as many bytes
LEVELS = 16  # of grey


def block_sizes(grid: tuple[int, int], maps: int, class_token: bool) -> tuple[int, int]:
    """Sides of the blocks of patches that are taken together, of queries and of keys.

    1 and 1, unless `maps` (those that one query has: layers x heads x photos) would be too many;
    then first queries and next keys have blocks of 2, and so on.
    """
    for step in range(2 * (max(grid) - 1).bit_length() + 1):
        query, key = 2 ** ((step + 1) // 2), 2 ** (step // 2)
        queries, keys = (math.prod(-(-n // size) for n in grid) for size in (query, key))
        if maps * (queries + class_token) * keys <= MOST:
            break
    return query, key


def photo(seen: Observed, sizes: tuple[int, int]) -> dict[str, Any]:
    """The maps of one photo, a batch of one, with blocks of `block_sizes`.

    Returns `layers`, a picture for each as `sheet` describes it, the grids of `queries` and of
    `keys` (rows, columns), and `class_token`: whether query 0 is that, before those of patches.
    """
    weights = np.asarray(seen.weights)[:, 0]  # [layers, heads, queries, keys]
    first, grid = int(seen.class_token), seen.grid
    keys = _pooled(weights[..., seen.prefix :], grid, sizes[1])  # [..., queries, rows, columns]
    per_patch = np.moveaxis(keys[:, :, seen.prefix :], 2, -1)
    counts = _pooled(np.ones(math.prod(grid)), grid, sizes[0])  # patches in each block
    queries = _pooled(per_patch, grid, sizes[0]) / counts
    queries = np.moveaxis(queries.reshape(*queries.shape[:-2], -1), -1, 2)
    maps = np.concatenate([keys[:, :, :first], queries], axis=2)
    return {
        'layers': [pictures.uri(sheet(layer)) for layer in maps],
        'queries': list(counts.shape),
        'keys': list(maps.shape[-2:]),
        'class_token': bool(first),
    }


def sheet(maps: Float[np.ndarray, 'heads queries rows columns']) -> np.ndarray:
    """All maps of a layer as one grey picture, uint8 [queries x (rows + 1), heads x columns].

    The map of a query and head is a tile of it: the square root of the weights, the largest of
    them white, rounded to LEVELS. Below each is a row whose first pixel is the square root of the
    largest weight, 255 standing for one.
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
    """[..., patches] to [..., rows, columns], summed over blocks of patches."""
    values = values.reshape(*values.shape[:-1], *grid)
    for axis, length in zip((-2, -1), grid, strict=True):
        values = np.add.reduceat(values, range(0, length, size), axis=axis)
    return values
