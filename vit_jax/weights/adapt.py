"""Fits pre-trained parameters to a model: a new head, another image size, other patches."""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jaxtyping import Float

from vit_jax.errors import UserError, some

HEAD = ('head', 'pre_logits')  # the whole pre-training head is removed (ViT section 3.2)


class Change(NamedTuple):
    """What became of one parameter: 'loaded', 'resized', 'dropped' or 'initialised'."""

    name: str
    action: str
    shape: tuple[int, ...]
    was: tuple[int, ...] | None = None


def adapt(
    params: Mapping,
    target: Mapping,
    *,
    grid: tuple[int, int],
    source_grid: tuple[int, int] | None = None,
    resize: str = 'bilinear',
    resize_patches: bool = False,
) -> tuple[dict, list[Change]]:
    """Pre-trained parameters, float32 in the shapes of a model without its head, and the changes.

    Args:
      params: nested, encoder blocks stacked.
      target: the model's parameters, arrays or jax.ShapeDtypeStruct.
      grid: (rows, columns) of patches of the model's images.
      source_grid: that of the pre-training's images; None if it is unknown or does not matter.
      resize: the method for position embeddings, see resize_grid.
      resize_patches: also fit the embedding's kernel to another patch size, see resize_kernel.

    Raises UserError if a parameter is missing, unknown, or of a shape that cannot be made to fit.
    """
    ours, head = _split_head(target)
    theirs, old_head = _split_head(params)
    _check_names(ours, theirs)
    changes = [Change(name, 'initialised', x.shape) for name, x in head.items()]
    changes += [Change(name, 'dropped', x.shape) for name, x in old_head.items()]
    result = {}
    prefix = sum(ours[name].shape[1] for name in ('cls', 'registers') if name in ours)
    for name, x in ours.items():
        array, was = np.asarray(theirs[name], np.float32), theirs[name].shape
        along_lines = name.endswith(('row/position/relative', 'column/position/relative'))
        of_tokens = name.endswith(('position/embedding', 'position/relative')) and not along_lines
        of_patches = name == 'embedding/kernel' and array.shape[2:] == x.shape[2:]
        # 4x4 and 2x8 patches have the same shape.
        resized = array.shape != x.shape or (of_tokens and source_grid not in (None, grid))
        if resized and along_lines:  # of axial attention, which has patches alone
            old_line, line = ((1, (shape[-3] + 1) // 2) for shape in (was, x.shape))
            array = resize_offsets(array, old_line, line, resize, prefix=0)
        elif resized and of_tokens:
            known_grid = _known_grid(name, array, source_grid, grid, prefix)
            of_table = resize_offsets if name.endswith('relative') else _resize_tokens
            array = of_table(array, known_grid, grid, resize, prefix)
        elif resized and name.endswith(('position/row', 'position/column')):
            array = resize_grid(array, x.shape[-3:-1], resize)
        elif resized and of_patches and resize_patches:
            array = resize_kernel(array, x.shape[:2])
        if array.shape != x.shape:
            hint = ' or set transfer.resize_patches=True' if of_patches else ''
            raise UserError(
                f'{name} has shape {was} in the pre-trained weights and {x.shape} in '
                f'the model. Choose the model that the weights are of{hint}.'
            )
        result[name] = array
        changes.append(Change(name, 'resized' if resized else 'loaded', x.shape, was))
    return traverse_util.unflatten_dict(result, sep='/'), changes


def _split_head(params):
    flat = traverse_util.flatten_dict(dict(params), sep='/')
    head = {name: x for name, x in flat.items() if name.split('/')[0] in HEAD}
    return {name: x for name, x in flat.items() if name not in head}, head


def resize_grid(
    embedding: Float[np.ndarray, '... rows columns hidden'], grid: tuple[int, int], method: str
) -> Float[np.ndarray, '... new_rows new_columns hidden']:
    """Position embeddings interpolated in two dimensions to `grid` (ViT section 3.2).

    `method` is 'bilinear' with the corners aligned, as in the paper's code, or 'bicubic' with
    antialiasing, as in timm.
    """
    old = embedding.shape[-3:-1]
    if method == 'bilinear':
        import scipy.ndimage  # a fifth of a second that --help need not wait for

        factors = (*(1,) * (embedding.ndim - 3), grid[0] / old[0], grid[1] / old[1], 1)
        return scipy.ndimage.zoom(embedding, factors, order=1)
    shape = (*embedding.shape[:-3], *grid, embedding.shape[-1])
    return np.asarray(jax.image.resize(embedding, shape, 'bicubic'))


def resize_kernel(
    kernel: Float[np.ndarray, 'height width channels hidden'], patch: tuple[int, int]
) -> Float[np.ndarray, 'new_height new_width channels hidden']:
    """The patch embedding for patches of another size (FlexiViT, arXiv 2212.08013, equation 4).

    Pseudo-inverse of the bilinear resize of patches: if patches grow, the new kernel embeds a
    resized patch as the old kernel embeds the patch itself.
    """
    old = kernel.shape[:2]
    basis = np.eye(old[0] * old[1], dtype=np.float32).reshape(*old, -1)
    resized = jax.image.resize(basis, (*patch, old[0] * old[1]), 'bilinear', antialias=False)
    matrix = np.asarray(resized, np.float64).reshape(patch[0] * patch[1], -1)  # new pixels of old
    new = np.linalg.pinv(matrix.T) @ kernel.reshape(old[0] * old[1], -1)
    return new.reshape(*patch, *kernel.shape[2:]).astype(np.float32)


def table(changes: list[Change]) -> str:
    """The changes as text: one line for each parameter that was not simply loaded, and a count."""
    lines = [
        f'  {c.action:<12} {c.name:<32} {c.shape}'
        + (f', was {c.was}' if c.action == 'resized' else '')
        for c in changes
        if c.action != 'loaded'
    ]
    sizes = [math.prod(c.shape) for c in changes if c.action == 'loaded']
    return '\n'.join([f'  {"loaded":<12} {len(sizes)} arrays, {sum(sizes):,} numbers', *lines])


def resize_offsets(
    table: Float[np.ndarray, '... offsets heads head_dim'],
    old: tuple[int, int],
    grid: tuple[int, int],
    method: str,
    prefix: int,
) -> Float[np.ndarray, '... new_offsets heads head_dim']:
    """Relative position embeddings of an `old` grid for another one (ViT appendix D.4).

    A row of the table belongs to an offset in the sequence (position.relative_logits), thus to up
    to two offsets on the grid: one to the right, or one down and the rest of the line to the left.
    The old ones, [2 rows - 1, 2 columns - 1], are interpolated as in resize_grid. Each new row is
    the mean of what its pairs of tokens should have, the best for all of them by least squares.
    Of each of `prefix` tokens before the patches, a class token and registers, the offsets to the
    patches are a grid each way and count as pairs, too.
    """
    flat = np.asarray(table, np.float32).reshape(*table.shape[:-2], -1)
    tokens = math.prod(grid) + prefix
    sums = np.zeros((*flat.shape[:-2], 2 * tokens - 1, flat.shape[-1]))
    counts = np.zeros(2 * tokens - 1)

    def add(rows, wanted, weights):
        for row, array, weight in zip(rows, np.moveaxis(wanted, -3, 0), weights, strict=True):
            sums[..., row, :] += array * weight[:, None]  # no row is there twice
            counts[row] += weight

    wide = [
        np.add.outer(np.arange(1 - rows, rows) * columns, np.arange(1 - columns, columns))
        for rows, columns in (old, grid)
    ]
    middle, new_middle = flat.shape[-2] // 2, tokens - 1
    pairs = [n - np.abs(np.arange(1 - n, n)) for n in grid]
    add(
        wide[1] + new_middle,
        _resize_centred(flat[..., wide[0] + middle, :], grid, method),
        np.outer(*pairs),
    )
    for first, sign in itertools.product(range(1, prefix + 1), (-1, 1)):
        places, new_places = (first + np.arange(math.prod(g)).reshape(g) for g in (old, grid))
        add(
            new_middle + sign * new_places,
            resize_grid(flat[..., middle + sign * places, :], grid, method),
            np.ones(grid),
        )
    return (
        (sums / counts[:, None])
        .astype(np.float32)
        .reshape(*table.shape[:-3], -1, *table.shape[-2:])
    )


def _resize_centred(offsets, grid, method):
    """Offsets between -n and n of each axis; of a single row or column only 0 is left."""
    for axis, n in zip((-3, -2), grid, strict=True):
        if n == 1:
            offsets = np.take(offsets, [offsets.shape[axis] // 2], axis)
    return resize_grid(offsets, tuple(2 * n - 1 for n in grid), method)


def _known_grid(
    name: str,
    array: np.ndarray,
    source_grid: tuple[int, int] | None,
    grid: tuple[int, int],
    prefix: int,
) -> tuple[int, int]:
    """`source_grid`; raises UserError if it is not known of which grid the positions are."""
    if source_grid is None:
        tokens = (array.shape[-3] + 1) // 2 if name.endswith('relative') else array.shape[-2]
        raise UserError(
            f'{name} has {tokens - prefix} patches in the pre-trained '
            'weights, which do not form a square, and nothing says for which image '
            'size they are: they fit only as many patches, and the images here have '
            f'{grid[0]}x{grid[1]}. Choose another image_size, or weights that state '
            'theirs.'
        )
    return source_grid


def _resize_tokens(array, source_grid, grid, method, prefix):
    """Resizes the positions of patches, behind `prefix` others, of one layer or stacked."""
    first, patches = array[..., :prefix, :], array[..., prefix:, :]
    patches = patches.reshape(*array.shape[:-2], *source_grid, array.shape[-1])
    resized = resize_grid(patches, grid, method)
    return np.concatenate([first, resized.reshape(*array.shape[:-2], -1, array.shape[-1])], -2)


def _check_names(ours, theirs):
    different = sorted(ours.keys() ^ theirs.keys())
    if different:
        lines = [
            f'{name}: '
            + (
                f'only in the model, {ours[name].shape}'
                if name in ours
                else f'only in the weights, {theirs[name].shape}'
            )
            for name in different
        ]
        raise UserError(
            'the pre-trained weights are of another architecture than the model:\n  '
            + some(lines, 12, '\n  ')
        )
