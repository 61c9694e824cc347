"""Fits pre-trained parameters to a model: a new head, another image size, other patches."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import scipy.ndimage
from flax import traverse_util
from jaxtyping import Array, Float

from vit_jax.errors import UserError

HEAD = ('head', 'pre_logits')  # the whole pre-training head is removed (ViT section 3.2)


class Change(NamedTuple):
    """What became of one parameter: 'loaded', 'resized', 'dropped' or 'initialised'."""

    name: str
    action: str
    shape: tuple[int, ...]
    was: tuple[int, ...] | None = None


def adapt(params: Mapping, target: Mapping, *, grid: tuple[int, int],
          source_grid: tuple[int, int] | None = None, resize: str = 'bilinear',
          resize_patches: bool = False) -> tuple[dict, list[Change]]:
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
    for name, x in ours.items():
        array, was = np.asarray(theirs[name], np.float32), theirs[name].shape
        of_tokens = name.endswith('position/embedding')
        # 4x4 and 2x8 patches have the same shape.
        resized = array.shape != x.shape or (of_tokens and source_grid not in (None, grid))
        if resized and of_tokens:
            array = _resize_tokens(name, array, grid, source_grid, resize, int('cls' in ours))
        elif resized and name.endswith(('position/row', 'position/column')):
            array = resize_grid(array, x.shape[-3:-1], resize)
        elif resized and name == 'embedding/kernel' and resize_patches and (
                array.shape[2:] == tuple(x.shape[2:])):
            array = resize_kernel(array, x.shape[:2])
        if array.shape != x.shape:
            hint = ' or set transfer.resize_patches=True' if name == 'embedding/kernel' else ''
            raise UserError(f'{name} has shape {was} in the pre-trained weights and '
                            f'{tuple(x.shape)} in the model. Choose the model that the weights '
                            f'are of{hint}.')
        result[name] = array
        changes.append(Change(name, 'resized' if resized else 'loaded', x.shape, was))
    return traverse_util.unflatten_dict(result, sep='/'), changes


def _split_head(params):
    flat = traverse_util.flatten_dict(dict(params), sep='/')
    head = {name: x for name, x in flat.items() if name.split('/')[0] in HEAD}
    return {name: x for name, x in flat.items() if name not in head}, head


def resize_grid(embedding: Float[np.ndarray, '... rows columns hidden'], grid: tuple[int, int],
                method: str) -> Float[np.ndarray, '... new_rows new_columns hidden']:
    """Position embeddings interpolated in two dimensions to `grid` (ViT section 3.2).

    `method` is 'bilinear' with the corners aligned, as in the paper's code, or 'bicubic' with
    antialiasing, as in timm.
    """
    old = embedding.shape[-3:-1]
    if method == 'bilinear':
        factors = (*(1,) * (embedding.ndim - 3), grid[0] / old[0], grid[1] / old[1], 1)
        return scipy.ndimage.zoom(embedding, factors, order=1)
    shape = (*embedding.shape[:-3], *grid, embedding.shape[-1])
    return np.asarray(jax.image.resize(embedding, shape, 'bicubic'))


def resize_kernel(kernel: Float[np.ndarray, 'height width channels hidden'],
                  patch: tuple[int, int]) -> Float[Array, 'new_height new_width channels hidden']:
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
    lines = [f'  {c.action:<12} {c.name:<32} {c.shape}'
             + (f', was {c.was}' if c.action == 'resized' else '')
             for c in changes if c.action != 'loaded']
    sizes = [math.prod(c.shape) for c in changes if c.action == 'loaded']
    return '\n'.join([f'  {"loaded":<12} {len(sizes)} arrays, {sum(sizes):,} numbers', *lines])


def _resize_tokens(name, array, grid, source_grid, method, class_tokens):
    """Resizes the positions of all tokens, class token first, of one layer or stacked."""
    if source_grid is None:
        raise UserError(f'{name} has {array.shape[-2] - class_tokens} patches in the pre-trained '
                        'weights, which do not form a square, and nothing says for which image '
                        'size they are: they fit only as many patches, and the images here have '
                        f'{grid[0]}x{grid[1]}. Choose another image_size, or weights that state '
                        'theirs.')
    prefix, patches = array[..., :class_tokens, :], array[..., class_tokens:, :]
    patches = patches.reshape(*array.shape[:-2], *source_grid, array.shape[-1])
    resized = resize_grid(patches, grid, method)
    return np.concatenate([prefix, resized.reshape(*array.shape[:-2], -1, array.shape[-1])], -2)


def _check_names(ours, theirs):
    different = sorted(ours.keys() ^ theirs.keys())
    if different:
        lines = [f'  {name}: ' + (f'only in the model, {tuple(ours[name].shape)}' if name in ours
                                  else f'only in the weights, {theirs[name].shape}')
                 for name in different]
        more = f'\n  and {len(lines) - 12} more' if len(lines) > 12 else ''
        raise UserError('the pre-trained weights are of another architecture than the model:\n'
                        + '\n'.join(lines[:12]) + more)
