"""Fits pre-trained parameters to a model: a new head, another image size, other patches."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jaxtyping import Float

from vit_jax.errors import UserError, some

HEAD = ('head', 'pre_logits')  # the whole head of the pre-training is removed (ViT section 3.2)


class Change(NamedTuple):
    """How one parameter was adapted.

    Attributes:
      name: the flat name of the parameter.
      action: 'loaded', 'resized', 'dropped' or 'initialised'.
      shape: its shape in the model; for 'dropped', its shape in the weights.
      old_shape: its shape in the weights, None for 'dropped' and 'initialised'.
    """

    name: str
    action: str
    shape: tuple[int, ...]
    old_shape: tuple[int, ...] | None = None


class _Resizing(NamedTuple):
    """How the parameters of patches are resized.

    Attributes:
      grid: (rows, columns) of patches of the model's images.
      source_grid: the grid of the pre-training images; None if it is unknown.
      num_prefix_tokens: tokens before the patches: the class token and registers.
      method: the method for position embeddings, see resize_grid.
      resize_patches: whether the patch embedding may be resized.
    """

    grid: tuple[int, int]
    source_grid: tuple[int, int] | None
    num_prefix_tokens: int
    method: str
    resize_patches: bool


def adapt(
    params: Mapping,
    target: Mapping,
    *,
    grid: tuple[int, int],
    source_grid: tuple[int, int] | None = None,
    resize: str = 'bilinear',
    resize_patches: bool = False,
    keep_head: bool = False,
) -> tuple[dict, list[Change]]:
    """Fits pre-trained parameters to the shapes of a model.

    Args:
      params: nested parameters, with the layers stacked.
      target: the model's parameters, arrays or jax.ShapeDtypeStruct.
      grid: (rows, columns) of patches of the model's images.
      source_grid: the grid of the pre-training images; None if it is unknown or does not matter.
      resize: the method for position embeddings, see resize_grid.
      resize_patches: whether to fit the patch embedding to another patch size, see resize_kernel.
      keep_head: whether the head stays. Otherwise the result is without it (ViT section 3.2).

    Returns:
      Nested parameters, float32, and a Change for each parameter.

    Raises:
      UserError: a parameter is missing or unknown, or its shape cannot be made to fit.
    """
    head_layers = () if keep_head else HEAD
    ours, head = _split(target, head_layers)
    theirs, old_head = _split(params, head_layers)
    _check_names(ours, theirs)
    resizing = _Resizing(grid, source_grid, _num_prefix_tokens(ours), resize, resize_patches)
    changes = [Change(name, 'initialised', x.shape) for name, x in head.items()]
    changes += [Change(name, 'dropped', x.shape) for name, x in old_head.items()]
    fitted = {}
    for name, expected in ours.items():
        array = np.asarray(theirs[name], np.float32)
        action = 'loaded'
        if _needs_resizing(name, array, expected, resizing):
            action = 'resized'
            array = _resized(name, array, expected.shape, resizing)
        if array.shape != expected.shape:
            raise _shape_error(name, theirs[name].shape, expected.shape)
        fitted[name] = array
        changes.append(Change(name, action, expected.shape, theirs[name].shape))
    return traverse_util.unflatten_dict(fitted, sep='/'), changes


def _split(params, layers):
    """(all parameters outside of some layers, the parameters of these layers), by flat name."""
    flat = traverse_util.flatten_dict(dict(params), sep='/')
    head = {name: x for name, x in flat.items() if name.split('/')[0] in layers}
    return {name: x for name, x in flat.items() if name not in head}, head


def _check_names(ours, theirs):
    different = sorted(ours.keys() ^ theirs.keys())
    if not different:
        return
    lines = []
    for name in different:
        if name in ours:
            lines.append(f'{name}: only in the model, {ours[name].shape}')
        else:
            lines.append(f'{name}: only in the weights, {theirs[name].shape}')
    raise UserError(
        'the pre-trained weights have another architecture than the model:\n  '
        + some(lines, 12, '\n  '),
        kind='content',
        value=different,
    )


def _num_prefix_tokens(flat):
    return sum(flat[name].shape[1] for name in ('cls', 'registers') if name in flat)


def _is_along_line(name):
    """Whether a parameter is a relative position embedding along rows or columns."""
    return name.endswith(('row/position/relative', 'column/position/relative'))


def _needs_resizing(name, array, expected, resizing):
    if array.shape != expected.shape:
        return True
    # Grids of 4x4 and 2x8 patches give embeddings of the same shape.
    is_of_tokens = name.endswith(('position/embedding', 'position/relative'))
    is_other_grid = resizing.source_grid not in (None, resizing.grid)
    return is_of_tokens and not _is_along_line(name) and is_other_grid


def _resized(name, array, shape, resizing):
    """The array resized to `shape`; unchanged if parameters of this name cannot be resized."""
    method = resizing.method
    if _is_along_line(name):  # axial attention has no other tokens than patches
        old_line = (1, (array.shape[-3] + 1) // 2)
        new_line = (1, (shape[-3] + 1) // 2)
        return resize_offsets(array, old_line, new_line, method, prefix=0)
    if name.endswith('position/relative'):
        old_grid = _known_grid(name, (array.shape[-3] + 1) // 2, resizing)
        return resize_offsets(array, old_grid, resizing.grid, method, resizing.num_prefix_tokens)
    if name.endswith('position/embedding'):
        old_grid = _known_grid(name, array.shape[-2], resizing)
        return _resize_tokens(array, old_grid, resizing.grid, method, resizing.num_prefix_tokens)
    if name.endswith(('position/row', 'position/column')):
        return resize_grid(array, shape[-3:-1], method)
    if _is_patch_size_difference(name, array.shape, shape) and resizing.resize_patches:
        return resize_kernel(array, shape[:2])
    return array


def _is_patch_size_difference(name, old_shape, shape):
    return name == 'embedding/kernel' and old_shape[2:] == shape[2:]


def _shape_error(name, old_shape, shape):
    remedy = 'Choose the model that the weights are of'
    if _is_patch_size_difference(name, old_shape, shape):
        remedy += ' or set transfer.resize_patches=True'
    return UserError(
        f'{name} has shape {old_shape} in the pre-trained weights and {shape} in the model. '
        f'{remedy}.',
        kind='content',
        field=name,
        value=old_shape,
    )


def _known_grid(name, num_tokens, resizing):
    """The grid of the pre-training images; UserError if it is unknown."""
    if resizing.source_grid is None:
        rows, columns = resizing.grid
        raise UserError(
            f'{name} has {num_tokens - resizing.num_prefix_tokens} patches in the pre-trained '
            'weights, which do not form a square, and the image size of the pre-training is '
            'unknown: they fit only images with as many patches, and the images here have '
            f'{rows}x{columns}. Choose another image_size, or weights that state their own.',
            kind='content',
            field=name,
        )
    return resizing.source_grid


def resize_grid(
    embedding: Float[np.ndarray, '... rows columns hidden'], grid: tuple[int, int], method: str
) -> Float[np.ndarray, '... new_rows new_columns hidden']:
    """Interpolates position embeddings in two dimensions to `grid` (ViT section 3.2).

    `method` is 'bilinear' with aligned corners, as in the paper's code, or 'bicubic' with
    antialiasing, as in timm.
    """
    old = embedding.shape[-3:-1]
    if method == 'bilinear':
        import scipy.ndimage  # importing it takes 0.2 s, which --help does not need

        factors = np.ones(embedding.ndim)
        factors[-3] = grid[0] / old[0]
        factors[-2] = grid[1] / old[1]
        return scipy.ndimage.zoom(embedding, factors, order=1)
    shape = (*embedding.shape[:-3], *grid, embedding.shape[-1])
    return np.asarray(jax.image.resize(embedding, shape, 'bicubic'))


def resize_kernel(
    kernel: Float[np.ndarray, 'height width channels hidden'], patch: tuple[int, int]
) -> Float[np.ndarray, 'new_height new_width channels hidden']:
    """Resizes a patch embedding to another patch size (FlexiViT, arXiv 2212.08013, equation 4).

    The kernel is multiplied by the pseudo-inverse of the bilinear resize of patches. If patches
    grow, the new kernel embeds a resized patch as the old kernel embeds the patch itself.
    """
    old = kernel.shape[:2]
    basis = np.eye(old[0] * old[1], dtype=np.float32).reshape(*old, -1)
    resized = jax.image.resize(basis, (*patch, old[0] * old[1]), 'bilinear', antialias=False)
    matrix = np.asarray(resized, np.float64).reshape(patch[0] * patch[1], -1)  # [new, old] pixels
    new = np.linalg.pinv(matrix.T) @ kernel.reshape(old[0] * old[1], -1)
    return new.reshape(*patch, *kernel.shape[2:]).astype(np.float32)


def _resize_tokens(array, old_grid, grid, method, prefix):
    """Resizes the embeddings of patches, after `prefix` other tokens; layers may be stacked."""
    first = array[..., :prefix, :]
    patches = array[..., prefix:, :].reshape(*array.shape[:-2], *old_grid, array.shape[-1])
    resized = resize_grid(patches, grid, method)
    return np.concatenate([first, resized.reshape(*array.shape[:-2], -1, array.shape[-1])], -2)


def resize_offsets(
    table: Float[np.ndarray, '... offsets heads head_dim'],
    old: tuple[int, int],
    grid: tuple[int, int],
    method: str,
    prefix: int,
) -> Float[np.ndarray, '... new_offsets heads head_dim']:
    """Resizes relative position embeddings from the grid `old` to another grid (ViT appendix D.4).

    A row of the table belongs to an offset in the sequence (position.relative_logits). Up to two
    offsets on the grid have the same offset in the sequence: some columns to the right, or one row
    down and the rest of the line to the left. The offsets on the old grid, [2 rows - 1, 2 columns -
    1], are interpolated as in resize_grid. Each new row is the mean over the pairs of tokens with
    this offset in the sequence, which is the least-squares fit to all of them. The `prefix` tokens
    before the patches (class token and registers) have a grid of offsets to the patches, and a grid
    of offsets from the patches. These pairs count equally.
    """
    flat = np.asarray(table, np.float32).reshape(*table.shape[:-2], -1)
    num_tokens = math.prod(grid) + prefix
    middle = flat.shape[-2] // 2  # the row of offset 0
    new_middle = num_tokens - 1
    sums = np.zeros((*flat.shape[:-2], 2 * num_tokens - 1, flat.shape[-1]))
    counts = np.zeros(2 * num_tokens - 1)

    def add(rows, embeddings, num_pairs):
        """Adds a grid of embeddings to the sums; each stands for `num_pairs` pairs of tokens."""
        by_line = zip(rows, np.moveaxis(embeddings, -3, 0), num_pairs, strict=True)
        for line, line_embeddings, line_pairs in by_line:  # a line has no row of the table twice
            sums[..., line, :] += line_embeddings * line_pairs[:, None]
            counts[line] += line_pairs

    # Pairs of two patches.
    old_offsets = flat[..., middle + _offsets_in_sequence(old), :]
    add(
        new_middle + _offsets_in_sequence(grid),
        _resize_centred(old_offsets, grid, method),
        np.outer(_num_pairs(grid[0]), _num_pairs(grid[1])),
    )
    # Pairs of a token before the patches and a patch.
    for distance in range(1, prefix + 1):  # from the token to the first patch
        places = distance + np.arange(math.prod(old)).reshape(old)
        new_places = distance + np.arange(math.prod(grid)).reshape(grid)
        for sign in (-1, 1):
            embeddings = resize_grid(flat[..., middle + sign * places, :], grid, method)
            add(new_middle + sign * new_places, embeddings, np.ones(grid))
    mean = (sums / counts[:, None]).astype(np.float32)
    return mean.reshape(*table.shape[:-3], -1, *table.shape[-2:])


def _offsets_in_sequence(grid):
    """The offset in the sequence for each offset on a grid, [2 rows - 1, 2 columns - 1]."""
    rows, columns = grid
    return np.add.outer(np.arange(1 - rows, rows) * columns, np.arange(1 - columns, columns))


def _num_pairs(n):
    """Number of pairs of n places in a line with each offset from 1 - n to n - 1."""
    return n - np.abs(np.arange(1 - n, n))


def _resize_centred(offsets, grid, method):
    """Resizes a grid of offsets, from 1 - n to n - 1 along each axis.

    An axis with a single place keeps only offset 0.
    """
    for axis, n in zip((-3, -2), grid, strict=True):
        if n == 1:
            offsets = np.take(offsets, [offsets.shape[axis] // 2], axis)
    return resize_grid(offsets, tuple(2 * n - 1 for n in grid), method)


def table(changes: list[Change]) -> str:
    """The changes as text: a count, and a line for each parameter that was not loaded unchanged."""
    sizes = [math.prod(change.shape) for change in changes if change.action == 'loaded']
    lines = [f'  {"loaded":<12} {len(sizes)} arrays, {sum(sizes):,} numbers']
    for change in changes:
        if change.action == 'loaded':
            continue
        line = f'  {change.action:<12} {change.name:<32} {change.shape}'
        if change.action == 'resized':
            line += f', was {change.old_shape}'
        lines.append(line)
    return '\n'.join(lines)
